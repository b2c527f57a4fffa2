"""Prompts, edge lengths and hostile tensors."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from probes.core.inputs import (
    Hostile,
    batch_of,
    check_context,
    edge_lengths,
    forced_tokens,
    read_prompt,
    read_prompts,
)
from reference.config import InputError

CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"
VOCAB = 2048


@pytest.fixture
def ids_file(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(list(range(10))))
    return path


def read(given, checkpoint=CHECKPOINT):
    return read_prompt(str(given), checkpoint, VOCAB)


# ---- prompts ----


def test_a_bundled_text_is_cut_in_tokens_and_goes_on_after_its_end():
    whole, part = read("medium.txt"), read("medium.txt:0:250")
    assert len(part.ids) == 250
    assert part.ids + part.continuation == whole.ids
    assert read("medium.txt:5:7").ids == whole.ids[5:7]
    assert read("medium.txt::3").ids == whole.ids[:3]
    assert read("medium.txt:1490:").ids == whole.ids[1490:]
    assert whole.continuation == ()


def test_text_gets_no_bos():
    from tokenizers import Tokenizer

    text = (CHECKPOINT / "prompts" / "short.txt").read_text()
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    assert list(read("short.txt").ids) == tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(list(read("short.txt").ids)) == text


def test_the_default_is_the_medium_text():
    (prompt,) = read_prompts([], CHECKPOINT, VOCAB)
    assert prompt.label == "medium.txt:0:250"
    assert len(prompt.continuation) >= 130


def test_token_ids_need_no_tokenizer(ids_file, tmp_path):
    assert read(f"{ids_file}:2:5", tmp_path) == read(f"{ids_file}:2:5")
    assert read(f"{ids_file}:2:5").ids == (2, 3, 4)
    assert read(f"{ids_file}:2:5").continuation == (5, 6, 7, 8, 9)


def test_a_file_whose_name_has_colons_wins_over_a_range(tmp_path):
    path = tmp_path / "a:1:2.json"
    path.write_text("[7, 8, 9]")
    assert read(path).ids == (7, 8, 9)
    assert read(f"{path}:1:2").ids == (8,)


def bad_json(text):
    def make(directory):
        (directory / "p.json").write_text(text)
        return directory / "p.json"

    return make


def bad_text(data, tokenizer="copy"):
    def make(directory):
        (directory / "p.txt").write_bytes(data)
        if tokenizer == "copy":
            shutil.copy(CHECKPOINT / "tokenizer.json", directory)
        elif tokenizer:
            (directory / "tokenizer.json").write_text(tokenizer)
        return directory / "p.txt"

    return make


def given(text):
    return lambda directory: text


BAD = {
    "no file": (given("nothing.txt"), "no such file 'nothing.txt'"),
    "no file with a range": (given("nothing.txt:0:5"), "no such file 'nothing.txt'"),
    "empty name": (given(""), "no such file"),
    "a directory": (lambda d: d, "no such file"),
    "a name no file can have": (given("a\0b"), "no such file"),
    "one number": (given("medium.txt:5"), "expected FILE[:START:END]"),
    "words": (given("medium.txt:a:b"), "'a'"),
    "negative start": (given("medium.txt:-5:10"), "'-5'"),
    "other digits": (given("medium.txt:٣:10"), "token counts"),
    "huge": (given("medium.txt:0:" + "9" * 5000), "token counts"),
    "end before start": (given("medium.txt:10:5"), "empty prompt"),
    "end at start": (given("medium.txt:5:5"), "empty prompt"),
    "end past the text": (given("short.txt:0:100000"), "reach past the text's 300 tokens"),
    "start past the text": (given("short.txt:300:"), "reach past"),
    "another kind of file": (given("config.yaml"), "no such file"),
    "a config": (given(str(CHECKPOINT / "model.safetensors.index.json") + "x"), "no such file"),
    "neither text nor ids": (given(str(CHECKPOINT / "model-00001-of-00002.safetensors")), "neither .txt"),
    "an object": (bad_json('{"a": 1}'), "list of token ids"),
    "broken": (bad_json("[1, 2"), "broken JSON"),
    "deeply nested": (bad_json("[" * 100000), "p.json"),
    "no ids": (bad_json("[]"), "empty prompt"),
    "a float": (bad_json("[1, 2.5]"), "got '2.5' at 1"),
    "a bool": (bad_json("[true]"), "got 'True' at 0"),
    "a batch": (bad_json("[[1, 2]]"), "got '[1, 2]' at 0"),
    "past the vocabulary": (bad_json("[1, 2048]"), "token id 2048 at 1 is out of range 0..2047"),
    "negative": (bad_json("[-1]"), "token id -1 at 0"),
    "huge id": (bad_json("[" + "9" * 30 + "]"), "out of range"),
    "empty text": (bad_text(b""), "empty prompt"),
    "no UTF-8": (bad_text(b"\xff\xfe\xfa"), "UTF-8"),
    "no tokenizer": (bad_text(b"hello", None), "no tokenizer.json"),
    "broken tokenizer": (bad_text(b"hello", "{}"), "no tokenizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_prompt_is_one_clear_line(case, tmp_path):
    make, message = BAD[case]
    where = make(tmp_path)
    with pytest.raises(InputError) as caught:
        read(where, tmp_path if (tmp_path / "p.txt").exists() else CHECKPOINT)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_prompt_lists_what_there_is():
    with pytest.raises(InputError, match=r"long\.txt, medium\.txt, short\.txt"):
        read("midium.txt")


def test_a_prompt_longer_than_the_context_names_the_flag():
    prompts = read_prompts(["short.txt"], CHECKPOINT, VOCAB)
    check_context(prompts, 20, 320)
    with pytest.raises(InputError, match="--max-context 321, got 320"):
        check_context(prompts, 21, 320)


def test_rows_are_padded_right(ids_file):
    prompts = read_prompts([f"{ids_file}:0:2", f"{ids_file}:5:9"], CHECKPOINT, VOCAB)
    tokens, lengths = batch_of(prompts)
    assert lengths.tolist() == [2, 4]
    assert tokens.tolist() == [[0, 1, 1, 1], [5, 6, 7, 8]]
    assert forced_tokens(prompts, 3).tolist() == [[2, 3, 4], [9, -1, -1]]
    assert forced_tokens(prompts, 0).shape == (2, 0)


# ---- lengths ----


def test_edges_sit_around_everything_that_turns_over():
    edges = edge_lengths(128, (0, 4, 128))
    assert set(edges) >= {1, 3, 4, 5, 127, 128, 129, 255, 256, 257}
    assert edge_lengths(128, (4,), most=5) == (1, 2, 3, 4, 5)
    assert list(edges) == sorted(set(edges))


# ---- hostile tensors ----


@pytest.mark.parametrize("shape", [(5, 33), (3, 4, 8), (7,), (1, 32), (0, 32)])
def test_a_hostile_input_is_right_inside_and_nan_outside(shape):
    value = Hostile().bf16(shape, seed=3)
    assert value.shape == torch.Size(shape)
    assert value.dtype == torch.bfloat16
    assert not value.isnan().any()
    storage = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    assert int(storage.isnan().sum()) == storage.numel() - value.numel()
    assert len(shape) < 1 or value.numel() == 0 or value.stride(-1) == 1


def test_rows_of_a_strided_input_lie_apart_and_packed_ones_do_not():
    hostile = Hostile()
    assert hostile.f32((4, 32), 1).stride() == (48, 1)
    assert hostile.f32((4, 32), 1, packed=True).is_contiguous()
    assert torch.equal(hostile.f32((4, 32), 1), hostile.f32((4, 32), 1, packed=True))


def test_values_follow_from_the_seed_alone():
    one, other = Hostile(seed=7), Hostile(seed=7)
    first = one.bf16((4, 8), 1)
    other.bf16((2, 2), 9)
    assert torch.equal(first, other.bf16((4, 8), 1))
    assert not torch.equal(first, one.bf16((4, 8), 2))
    assert not torch.equal(first, Hostile(seed=8).bf16((4, 8), 1))


def test_uniform_values_stay_between_their_ends():
    value = Hostile().f32((1000,), 1, lo=2, hi=3)
    assert 2 <= float(value.min()) < float(value.max()) <= 3


@pytest.mark.parametrize(("dtype", "poison"), [(torch.uint8, 255), (torch.int32, -1), (torch.int64, -1)])
def test_integers_are_poisoned_with_all_bits(dtype, poison):
    assert Hostile().poisoned((2, 3), dtype).eq(poison).all()
    codes = torch.arange(6, dtype=dtype).view(2, 3)
    assert torch.equal(Hostile().strided(codes), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8])
def test_a_write_past_an_output_is_noticed(dtype):
    hostile = Hostile()
    out = hostile.poisoned((4, 8), dtype)
    out.zero_()
    hostile.check_guards()
    torch.as_strided(out, (1,), (1,), out.storage_offset() + 32).zero_()
    with pytest.raises(AssertionError, match="guard after"):
        hostile.check_guards()


def test_an_unwritten_output_is_nan():
    assert Hostile().poisoned((2, 3), torch.float32).isnan().all()
