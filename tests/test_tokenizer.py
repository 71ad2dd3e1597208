"""What a checkpoint's files say about its tokens."""

import json
import subprocess
import sys

import chat_templates
import pytest

from rl_adapter.hub.tokenizer import load_tokenizer, make_tokenizer, parse_backend

EOS, START, IM_END = 0, 1, 2  # <|endoftext|>, <|im_start|>, <|im_end|>


@pytest.fixture
def directory(tmp_path):
    chat_templates.backend("chatml").save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "generation_config", {"eos_token_id": [IM_END, EOS], "bos_token_id": START, "pad_token_id": IM_END})
    return tmp_path


def write(directory, name, value):
    (directory / f"{name}.json").write_text(json.dumps(value))


def test_every_stop_id_is_kept_and_may_pad(directory):
    made = load_tokenizer(directory, 400)
    assert made.stop_ids == (IM_END, EOS) and made.pad_id == IM_END
    assert made.special_ids == {EOS, START, IM_END}
    assert made.encode("the<|im_end|>", special=False)[-1] == IM_END and made.decode([*made.encode("the"), IM_END]) == "the"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d", "the answer" * 50 + "\udc80"])
def test_half_a_character_is_refused(directory, text):
    made = load_tokenizer(directory, 400)
    for special in (True, False):
        with pytest.raises(ValueError, match=r"^text to encode: found half a character, '\\ud[0-9a-f]{3}', at index") as error:
            made.encode(text, special)
        assert len(str(error.value)) < 300
    assert made.decode(made.encode("\U0001f600")) == "\U0001f600", "both halves are one"


def test_special_tokens_by_id_then_map_then_config(directory):
    by_id = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    assert load_tokenizer(directory, 400).special == by_id
    write(directory, "special_tokens_map", {"pad_token": "<p>", "unk_token": {"content": "<u>", "lstrip": False}, "sep_token": None})
    assert load_tokenizer(directory, 400).special == by_id | {"pad_token": "<p>", "unk_token": "<u>"}
    extra = {"extra_special_tokens": {"image_token": "<i>"}}
    write(directory, "tokenizer_config", {"add_bos_token": True, "unk_token": "<v>", "eos_token": {"content": "<e>"}} | extra)
    expected = by_id | {"pad_token": "<p>", "unk_token": "<v>", "eos_token": "<e>", "image_token": "<i>"}
    assert load_tokenizer(directory, 400).special == expected


def test_template_of_the_config_and_of_its_own_file(directory):
    assert load_tokenizer(directory, 400).template is None
    write(directory, "tokenizer_config", {"chat_template": "one"})
    assert load_tokenizer(directory, 400).template == "one"
    write(directory, "tokenizer_config", {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "two"}]})
    assert load_tokenizer(directory, 400).template == "two"
    (directory / "chat_template.jinja").write_text("three é", encoding="utf-8")
    assert load_tokenizer(directory, 400).template == "three é"


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"chat_template": 3}, "chat_template: found int"),
        ({"chat_template": {"default": "x"}}, "chat_template: found dict"),
        ({"chat_template": [{"name": "tool_use", "template": "t"}]}, "tool_use.*need one named 'default'"),
        ({"chat_template": [{"name": "default", "template": 3}, 4, {"name": []}]}, "need one named 'default'"),
        ({"chat_template": []}, "need one named 'default'"),
        ({"eos_token": 3}, "eos_token: found 3"),
        ({"eos_token": {"content": [1]}}, "eos_token"),
        ({"extra_special_tokens": {"image_token": 3}}, "image_token: found 3"),
    ],
)
def test_config_errors(directory, config, match):
    write(directory, "tokenizer_config", config)
    with pytest.raises(ValueError, match=f"tokenizer_config.json: .*{match}"):
        load_tokenizer(directory, 400)


def test_template_file_errors(directory):
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="chat_template.jinja: need a text file"):
        load_tokenizer(directory, 400)


def test_from_parts():
    backend = chat_templates.backend("chatml")
    backend.enable_truncation(1)
    backend.enable_padding(length=9)
    made = make_tokenizer(backend, 400, [IM_END, EOS, IM_END], special={"eos_token": "<|im_end|>"}, template="x")
    assert made.stop_ids == (IM_END, EOS) and made.pad_id == IM_END and made.template == "x"
    assert len(made.encode("the answer")) not in (1, 9)
    assert make_tokenizer(backend, 400, EOS, 0).pad_id == 0
    again = make_tokenizer(parse_backend(backend.to_str()), 400, IM_END, bos_id=START, special={"eos_token": "<e>"})
    assert again.special == {"bos_token": "<|im_start|>", "eos_token": "<e>"} and again.encode("the") == made.encode("the")


@pytest.mark.parametrize("text", ["", "{}", "[" * 9999, '{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}'])
def test_parse_errors(text):
    with pytest.raises(ValueError, match="x.gguf: need a tokenizer"):
        parse_backend(text, "x.gguf")


@pytest.mark.parametrize(
    ("vocab", "stop", "pad", "match"),
    [
        (3, 0, 0, "tokenizer: found token id"),
        (400, [], 0, "eos_token_id: found"),
        (400, None, 0, "eos_token_id: found"),
        (400, [0, 400], 0, "eos_token_id: found"),
        (400, [True], 0, "eos_token_id: found"),
        (400, 0, -1, "pad_token_id: found -1"),
        (400, 0, 1.0, "pad_token_id: found 1.0"),
    ],
)
def test_from_parts_errors(vocab, stop, pad, match):
    with pytest.raises(ValueError, match=match):
        make_tokenizer(chat_templates.backend("chatml"), vocab, stop, pad)


def test_the_worker_is_no_importer_of_the_package():
    """Its start-up is part of the first rendering: a JAX import there would be seconds."""
    source = "import sys; sys.argv = ['x']; import runpy; runpy.run_path(sys.stdin.read()); print('rl_adapter' in sys.modules)"
    from rl_adapter.hub import chat

    path = str(chat.pathlib.Path(chat.__file__).with_name("template_worker.py"))
    out = subprocess.run([sys.executable, "-P", "-c", source], input=path, capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"
