"""Tests prompt files: what is read, and that anything else in one is refused in one line that says where."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile
from PIL import Image

from omni_async.config import ConfigError
from omni_async.data.audio_files import read_prompt_audio
from omni_async.data.bad_places import BadPlaces
from omni_async.data.image_files import read_prompt_image
from omni_async.data.prompts import load_prompts
from omni_async.data.video_files import read_prompt_videos
from omni_async.media import Media
from omni_async.records.write.images import write_media
from omni_async.types import Prompt, PromptAudio
from tests.support.effort import LINEAR, TIMES, growth, require_lines


def read(folder: Path, content: str | bytes, name: str = "prompts.txt") -> list[Prompt]:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load_prompts(str(path), "data.prompts", max_chars=50)


def refusal(folder: Path, content: str | bytes, name: str = "prompts.txt") -> str:
    with pytest.raises(ConfigError) as refused:
        read(folder, content, name)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def nested(levels: int) -> str:
    """Makes a line whose object is the first of so many levels."""
    return '{"prompt": "x", "note": ' + "[" * (levels - 1) + "{}" + "]" * (levels - 1) + "}"


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("p.txt", "a cat\n\n   \n  a dog \r\na cat", ["a cat", "a dog", "a cat"]),
        ("P.TXT", b"\xef\xbb\xbfa cat\n", ["a cat"]),
        ("p.JsonL", b'\xef\xbb\xbf{"prompt": "a cat"}\n', ["a cat"]),
    ],
)
def test_a_file_is_a_prompt_a_line_without_the_empty_ones_and_a_byte_order_mark(tmp_path, name, content, prompts):
    assert read(tmp_path, content, name) == [Prompt(i, text) for i, text in enumerate(prompts)]


def test_a_json_line_has_a_prompt_a_target_and_whatever_else(tmp_path):
    line = '{"prompt": "the digit 7", "target": "7", "font": "serif", "n": 1}'
    deep, colons = nested(49), '{"prompt": "at 10:30", "of": {"a": {"a": 1}}}'
    prompt, plain, *rest = read(tmp_path, "\n".join([line, '{"prompt": "x"}', deep, colons]), "p.jsonl")
    assert prompt == Prompt(0, "the digit 7", "7", {"font": "serif", "n": 1})
    assert plain == Prompt(1, "x", None, {})
    assert rest[0].metadata.keys() == {"note"} and rest[1].metadata == {"of": {"a": {"a": 1}}}


NO_PROMPTS = {
    '["a cat"]': 'expected an object such as {"prompt": "a cat"}, got ["a cat"]',
    "{}": 'the row is empty; expected an object such as {"prompt": "a cat"}',
    '{"text": "a cat"}': "expected a field `prompt`, got text; name its column, as data.columns.prompt=text",
    '{"prompt": ""}': "the prompt is empty; write its text, or remove the row",
    '{"prompt": null}': "the prompt is empty; write its text, or remove the row",
    '{"prompt": 7}': "prompt: expected a string, got 7; write it in quotation marks",
}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt": "a cat"', "not valid JSON"),
        ("a cat", "not valid JSON"),
        *NO_PROMPTS.items(),
        ('{"prompt": "x", "target": 7}', "target: expected a string, got 7"),
        ("[" * 100_000, "not valid JSON: nested more than 50 levels deep"),
        (nested(900), "nested more than 50 levels deep"),
        (nested(50), "nested more than 50 levels deep"),
        ('{"prompt": "x", "prompt": "y"}', "key 'prompt' given twice"),
        ('{"prompt": "x", "of": {"a": 1, "b": [{"a": 1, "a": 2}]}}', "key 'a' given twice"),
        ('{"prompt": "half \\ud800"}', "half a surrogate pair"),
        ('{"prompt": "x", "note": "\\udc00"}', "invalid utf-16 surrogate pair"),
        ('{"prompt": "x\\u0000"}', "holds the character U+0000"),
        ('{"prompt": "x", "target": "\\u0000"}', "holds the character U+0000"),
    ],
)
def test_a_broken_json_line_is_refused_with_its_number(tmp_path, line, why):
    message = refusal(tmp_path, f'{{"prompt": "fine"}}\n\n{line}\n', "p.jsonl")
    assert message.startswith("data.prompts: ") and "p.jsonl:3: " in message and why in message


def test_a_table_with_another_separator_is_refused_with_the_separators(tmp_path):
    said = refusal(tmp_path, "prompt;target\na;b\n", "p.csv")
    assert said.endswith("got prompt;target; the cells of a .csv are separated by commas, those of a .tsv by tabs")


def test_a_file_that_is_not_there_or_empty_or_not_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^validation\.prompts: no such file: .*nowhere\.txt$"):
        load_prompts(str(tmp_path / "nowhere.txt"), "validation.prompts", 10)
    (tmp_path / "empty.txt").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be read: it is a folder, not a file$"):
        load_prompts(str(tmp_path / "empty.txt"), "data.prompts", 10)
    with pytest.raises(ConfigError, match="cannot be read: it is a folder, not a file; expected a saved dataset"):
        load_prompts(str(tmp_path), "data.prompts", 10)
    for content, why in {
        **dict.fromkeys(("", "\n\n", "  \t \n"), "holds no prompts; expected one a line"),
        b"fine\ncaf\xe9\n": "prompts.txt:2: not UTF-8 text: byte 0xe9: ",
        "a cat".encode("utf-16"): "prompts.txt:1: not UTF-8 text: byte 0xff: invalid start byte; it is UTF-16, which",
        b"a\0b\n": "prompts.txt:1: holds the character U+0000",
        "short\n" + "x" * 51: "prompts.txt:2: the prompt has 51 characters, data.max_prompt_chars allows 50",
    }.items():
        assert why in refusal(tmp_path, content)


def test_a_format_without_a_reader_is_refused_with_those_that_have_one(tmp_path):
    for name, got in (("p.xlsx", ".xlsx"), ("p.txt.gz", ".gz; unpack it"), ("prompts", "no suffix")):
        formats = ".txt, .jsonl, .json, .csv, .tsv, .parquet, .arrow"
        expected = f"{name}: expected a folder or one of {formats}, got {got}"
        assert refusal(tmp_path, "prompt\na cat\n", name).endswith(expected)


def test_what_checks_miss_is_reported_with_line_numbers(tmp_path):
    (tmp_path / "p.txt").write_text("with a cat\n\nwithout\n\n\nalso a cat")
    path = str(tmp_path / "p.txt")
    checks = [lambda prompt: None, lambda prompt: None if "cat" in prompt.text else f"no cat in {prompt.text!r}"]
    with pytest.raises(ConfigError, match=r"^data\.prompts: .*p\.txt:3: no cat in 'without'$"):
        load_prompts(path, "data.prompts", 50, checks)
    with pytest.raises(ConfigError, match=r"^k: .*p\.txt:3: second; line 6: last$"):
        load_prompts(path, "k", 50, whole=lambda prompts: {len(prompts) - 1: "last", 1: "second"})


def test_all_wrong_lines_are_named_at_once_ten_at_most(tmp_path):
    lines = [f'{{"prompt": "{"" if i % 2 else "fine"}"}}' for i in range(30)]
    lines[2] = '{"prompt": "a cat'
    said = refusal(tmp_path, "\n".join(lines), "p.jsonl")
    path = tmp_path / "p.jsonl"
    why = NO_PROMPTS['{"prompt": ""}']
    also = "(also 14 more: line 4, 6, 8, 10, 12, ...)"
    assert said.startswith(f"data.prompts: {path}:2: {why} {also}; line 3: not v") and said.count("; line ") == 1
    said = refusal(tmp_path, "\n".join(f'{{"prompt": {i}}}' for i in range(12)), "p.jsonl")
    assert said.endswith("got 0; write it in quotation marks (also 11 more: line 2, 3, 4, 5, 6, ...)")
    distinct = [f"{'x' * (51 + i)}" for i in range(12)]
    assert refusal(tmp_path, "\n".join(distinct)).endswith("; and 2 more")


def test_ten_long_problems_that_many_lines_have_fit_into_a_message():
    bad = BadPlaces("line")
    for i in range(11 * 8):
        bad.add(f"{'p' * 300}:{10**6 + i}", 10**6 + i, f"{i % 11} {'x' * 500}")
    with pytest.raises(ConfigError) as raised:
        bad.require_none(last="the end")
    said = str(raised.value)
    assert said.startswith("ppp") and said.endswith("; and 8 more; the end") and len(said) <= 2000
    assert said.count("; line 10000") == 9 and said.count("(also 7 more: line 1000") == 3


def test_a_million_prompts_are_read_in_seconds(tmp_path):
    """A prompt takes some 90 lines of Python, which are microseconds, and not more in a longer file."""
    line = '{"prompt": "a sign that says \\"open\\"", "target": "open", "language": "en", "n": 1}\n'
    for number in (1000, 5000, TIMES * 5000):
        (tmp_path / f"{number}.jsonl").write_text(line * number)

    def load(number: int) -> list[Prompt]:
        return load_prompts(str(tmp_path / f"{number}.jsonl"), "data.prompts", 50, [lambda prompt: None])

    assert len(load(5000)) == 5000
    require_lines(1000 * 100, lambda: load(1000))
    assert growth(load, 5000) < LINEAR


def test_only_a_line_feed_ends_a_line(tmp_path):
    for separator in ("\u2028", "\x85", "\x0c", "\x1c"):  # which Python's splitlines takes for line ends
        assert len(read(tmp_path, f"a{separator}b\nc")) == 2
        line = msgspec.json.encode({"prompt": f"a{separator}b"})
        assert read(tmp_path, line, "p.jsonl")[0].text == f"a{separator}b"


# ---- prompts with images ---------------------------------------------------------------------------------------------


def draw(path: Path, colour: int = 90, **how: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (6, 4), (colour, 20, 30)).save(path, **how)
    return path


def with_images(value: object, key: str = "images") -> str:
    return msgspec.json.encode({"prompt": "edit it", key: value, "note": 1}).decode()


def test_images_are_found_beside_the_prompt_file_and_keep_their_digest(tmp_path):
    first, second = draw(tmp_path / "a.png"), draw(tmp_path / "below" / "b.jpg", 200)
    lines = [with_images("a.png", "image"), with_images(["a.png", "./below/b.jpg"]), with_images([])]
    one, two, none = read(tmp_path, "\n".join(lines), "p.jsonl")
    assert [image.path for image in two.images] == [str(first), str(second)]
    assert one.images == two.images[:1] and none.images == () and one.metadata == {"note": 1}
    assert len({image.digest for image in two.images}) == 2
    assert msgspec.json.decode(msgspec.json.encode(two), type=Prompt) == two
    assert read_prompt_image(two.images[1]).image.shape == (3, 4, 6)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (with_images("nowhere.png", "image"), "image: no such file: 'nowhere.png'"),
        (with_images(["fine.png", "text.png"]), "image 'text.png': not a PNG, JPEG or WebP image"),
        (with_images("cut.png", "image"), "image 'cut.png': the image cannot be decoded"),
        (with_images("cut.jpg", "image"), "image 'cut.jpg': the image cannot be decoded: OSError: image file is trunc"),
        (with_images("cut.webp", "image"), "image 'cut.webp': "),
        (with_images("../outside.png", "image"), "'../outside.png' leads out of the prompt file's folder"),
        (with_images("/etc/passwd", "image"), "leads out of the prompt file's folder"),
        (with_images("fine.png"), "images: expected a list of paths, got 'fine.png'"),
        (with_images([1]), "images: expected a list of paths, got [1]"),
        (with_images(["fine.png"], "image"), "image: expected a path, got ['fine.png']"),
        ('{"prompt": "x", "image": "fine.png", "images": []}', "give image or images, not both"),
    ],
)
def test_an_image_that_is_none_is_refused_with_file_and_line(tmp_path, line, error):
    folder = tmp_path / "data"
    content = draw(folder / "fine.png").read_bytes()
    draw(tmp_path / "outside.png")
    (folder / "text.png").write_text("no image")
    (folder / "cut.png").write_bytes(content[:-20])
    noise = Image.effect_noise((200, 100), 90)
    for suffix in ("jpg", "webp"):
        noise.save(folder / f"cut.{suffix}")
        whole = (folder / f"cut.{suffix}").read_bytes()
        (folder / f"cut.{suffix}").write_bytes(whole[: len(whole) // 2])
    said = refusal(folder, '{"prompt": "x"}\n' + line, "p.jsonl")
    assert said.startswith(f"data.prompts: {folder / 'p.jsonl'}:2: ") and error in said


def test_an_image_that_changed_while_the_run_went_on_is_refused(tmp_path):
    file = draw(tmp_path / "a.png")
    [prompt] = read(tmp_path, with_images("a.png", "image"), "p.jsonl")
    draw(file, 91)
    with pytest.raises(ValueError, match=r"a\.png has changed since the run began"):
        read_prompt_image(prompt.images[0])
    file.unlink()
    with pytest.raises(ValueError, match=r"a\.png cannot be read: No such file"):
        read_prompt_image(prompt.images[0])


# ---- prompts with audio ----------------------------------------------------------------------------------------------


def test_audio_is_found_beside_the_prompt_file_and_decoded(tmp_path):
    wave = np.stack([np.sin(np.arange(4000) / 7), np.zeros(4000)], axis=1) / 2
    soundfile.write(tmp_path / "a.wav", wave, 8000)
    lines = [with_images("a.wav", "audio"), with_images(["a.wav", "a.wav"], "audio"), with_images([], "audio")]
    one, two, none = read(tmp_path, "\n".join(lines), "p.jsonl")
    assert [len(prompt.audio) for prompt in (one, two, none)] == [1, 2, 0] and one.metadata == {"note": 1}
    assert one.audio[0].path == str(tmp_path / "a.wav") and two.digests == 2 * one.digests
    assert one.content != none.content == Prompt(2, "edit it", metadata={"note": 1}).content
    assert msgspec.json.decode(msgspec.json.encode(two), type=Prompt) == two
    heard = read_prompt_audio(one.audio[0], 8000)
    assert np.abs(heard - wave.mean(axis=1)).max() < 1e-4 and heard.dtype == np.float32
    assert abs(len(read_prompt_audio(one.audio[0], 16_000)) - 8000) < 64
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(ValueError, match=r"the prompt's audio .*a\.wav has changed since the run began"):
        read_prompt_audio(one.audio[0], 8000)


@pytest.mark.parametrize("part", ["audio", "video"])
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("nowhere.wav", "{}: no such file: 'nowhere.wav'"),
        ("text.wav", "{} 'text.wav': the {} cannot be decoded"),
        (["../text.wav"], "leads out of the prompt file's folder"),
        (7, "{}: expected a path or a list of paths, got 7"),
        ([""], "{}: expected a path or a list of paths, got ['']"),
    ],
)
def test_audio_or_video_that_is_none_is_refused_with_file_and_line(tmp_path, part, given, error):
    (tmp_path / "text.wav").write_text("no sound")
    said = refusal(tmp_path, '{"prompt": "x"}\n' + with_images(given, part), "p.jsonl")
    assert said.startswith(f"data.prompts: {tmp_path / 'p.jsonl'}:2: ") and error.format(part, part) in said


def test_video_is_found_beside_the_prompt_file_and_decoded(tmp_path):
    [film] = write_media(Media(video=np.zeros((4, 3, 32, 48), np.uint8), fps=4.0), tmp_path / "a")
    lines = [with_images("a.mp4", "video"), with_images(["a.mp4", "a.mp4"], "video"), with_images([], "video")]
    one, two, none = read(tmp_path, "\n".join(lines), "p.jsonl")
    assert [len(prompt.video) for prompt in (one, two, none)] == [1, 2, 0] and one.metadata == {"note": 1}
    assert one.video[0].path == str(film) and two.digests == 2 * one.digests
    heard = msgspec.structs.replace(none, audio=(PromptAudio("a", one.digests[0]),))
    assert len({str(prompt.content) for prompt in (one, two, none, heard)}) == 4
    assert none.content == Prompt(2, "edit it", metadata={"note": 1}).content
    assert msgspec.json.decode(msgspec.json.encode(two), type=Prompt) == two
    film.write_bytes(b"")
    with pytest.raises(ValueError, match=r"the prompt's video .*a\.mp4 has changed since the run began"):
        read_prompt_videos(one.video, 0.5, 8, 2**20)
