// Sends the token to the server, once; the answer begins a session and contains the key for buttons.

document.getElementById("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const said = document.getElementById("said");
  const body = JSON.stringify({ token: document.getElementById("token").value });
  try {
    const response = await fetch("login", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    sessionStorage.setItem("omni-async-key", answer.key);
    location.reload();
  } catch (error) {
    said.textContent = error.message;
  }
});
