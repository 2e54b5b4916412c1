"""Counts tokens with a checkpoint's tokenizers, in a process without torch: `prompt_limits` runs this file.

Reads a JSON list of `{"folder", "cls", "texts"}` from standard input; a text is a string, or a chat of messages
`[role, content]`. Writes `{"counts": [[...], ...]}`, or `{"folder", "error"}` of a tokenizer that cannot be used.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

_AT_ONCE = 1000  # texts per call, to bound the tokens in memory


def _counts(folder: str, cls: str, texts: list[Any]) -> list[int]:
    import transformers
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()  # otherwise every text longer than the tokenizer's own limit causes a warning
    tokenizer: Any = getattr(transformers, cls).from_pretrained(folder, local_files_only=True)

    def written(text: Any) -> str:
        if isinstance(text, str):
            return text
        messages = [{"role": role, "content": content} for role, content in text]
        chat: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return chat

    found: list[int] = []
    for start in range(0, len(texts), _AT_ONCE):
        ids = tokenizer([written(text) for text in texts[start : start + _AT_ONCE]]).input_ids
        found += [len(one) for one in ids]
    return found


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers need none of its seconds and memory
    asked, counts = json.load(sys.stdin), []
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # libraries print
        for one in asked:
            try:
                counts.append(_counts(**one))
            except Exception as error:  # noqa: BLE001 (libraries raise any exception on foreign files)
                json.dump({"folder": one["folder"], "error": f"{type(error).__name__}: {error}"}, out)
                return
    json.dump({"counts": counts}, out)


if __name__ == "__main__":
    main()
