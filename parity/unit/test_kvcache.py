"""probes.kv_cache: a described cache is read in any layout, and each planted fault is named for what it is and where."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from docs.examples import kv_cache as example
from docs.examples.small_engine import open_engine
from probes import kv_cache
from probes.outside.kvcache import ENTRIES, INDEXER, WINDOW, Format, Pool, _fewest, format_of, read_cache
from production.cache import encode_entries, encode_index_keys
from reference.config import InputError, ModelConfig

TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"
CONFIG = ModelConfig.from_dir(TINY)
LENGTHS, LAYER, BLOCK, SLOTS = (150, 137), 2, 16, 160  # layer 2 has all three stores
TOKENS = [[(7 * i * i + 11 * i + 5 * b) % 2000 for i in range(n)] for b, n in enumerate(LENGTHS)]


def packed(store, rows):
    """Codes and scales of decoded entries."""
    if store == INDEXER:
        return encode_index_keys(rows)
    form = format_of(CONFIG, store)
    entry = encode_entries(rows, CONFIG)
    return entry[:, : form.codes], entry[:, form.codes : form.codes + form.scales]


def named(store):
    """A pool that only says which entries it holds."""
    return Pool(LAYER, store, format_of(CONFIG, store), torch.zeros(1), torch.zeros(1, 1), 1, 1, 1, 0, torch.zeros(1), 0, 1, 1)


@pytest.fixture(scope="module")
def stored():
    pools = [named(store) for store in (WINDOW, ENTRIES, INDEXER)]
    return kv_cache.stored_by_reference(str(TINY), TOKENS, pools, "published")


class Engine:
    """Writes the reference's entries the way a paged engine does, and lets a fault touch them. apart: scales behind a page's codes."""

    def __init__(self, stored, apart=False):
        self.apart, self.tensors, self.stores, self.pages = apart, {}, {}, {}
        generator = torch.Generator().manual_seed(1)
        for (_, store), rows in stored.items():
            form = format_of(CONFIG, store)
            ring = SLOTS if store == WINDOW else 0
            columns = -(-max(ring, *(len(r) for r in rows)) // BLOCK) if not ring else ring // BLOCK
            order = torch.randperm(columns * len(rows) + 3, generator=generator)[: columns * len(rows)].reshape(len(rows), columns)
            self.codes = form.codes if apart else form.size
            page = BLOCK * (form.codes + form.scales) if apart else BLOCK * form.size
            self.tensors[store] = torch.randint(1, 120, ((columns * len(rows) + 3), page), dtype=torch.uint8, generator=generator)
            self.pages[store] = order
            said = {"tensor": store, "block_size": BLOCK, "page_table": order.tolist()} | ({"slots": ring} if ring else {})
            if apart:
                said |= {"page_stride": page, "scales": {"offset": BLOCK * form.codes, "stride": form.scales}}
            self.stores[store] = said
            for b, values in enumerate(rows):
                for number in range(len(values)):
                    self.write(store, b, number, values[number : number + 1])

    def views(self, store, row, number):
        """Codes and scales of an entry where they lie."""
        form = format_of(CONFIG, store)
        slot = number % SLOTS if store == WINDOW else number
        page = self.tensors[store][self.pages[store][row, slot // BLOCK]]
        at = slot % BLOCK
        if self.apart:
            first = BLOCK * form.codes + at * form.scales
            return page[at * form.codes : (at + 1) * form.codes], page[first : first + form.scales]
        return page[at * form.size : at * form.size + form.codes], page[at * form.size + form.codes : at * form.size + form.codes + form.scales]

    def write(self, store, row, number, values):
        for into, data in zip(self.views(store, row, number), packed(store, values), strict=True):
            into.copy_(data[0])

    def save(self, to):
        to.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, to / "cache.safetensors")
        described = {"kind": "dsv4-kv-cache", "schema": 1, "engine": "toy", "tokens": TOKENS, "layers": {str(LAYER): self.stores}}
        (to / "cache.json").write_text(json.dumps(described))
        return to


def probe(capsys, directory, *options):
    code = kv_cache.main([str(directory), "--checkpoint", str(TINY), *options])
    out = capsys.readouterr().out
    return code, json.loads(out.splitlines()[-1]), out


def wrong_in(values):
    return {one["store"]: one["wrong"] for one in values["stores"]}


def test_the_example_writes_a_cache_that_agrees_and_a_swapped_page_in_it_is_found(tmp_path, capsys):
    assert example.main([str(tmp_path / "c")]) == 0
    code, values, _ = probe(capsys, tmp_path / "c")
    assert (code, values["differ"], [(one["layer"], one["entries"]) for one in values["stores"]]) == (0, 0, [(0, 128), (1, 128)])
    assert max(one["worst"]["error"] for one in values["stores"]) < 0.01
    said = json.loads((tmp_path / "c" / "cache.json").read_text())
    table = said["layers"]["1"]["window"]["page_table"][0]
    table[0], table[1] = table[1], table[0]
    (tmp_path / "c" / "cache.json").write_text(json.dumps(said))
    _, values, _ = probe(capsys, tmp_path / "c")
    assert values["differ"] == 32
    assert example.main([]) == 2


@pytest.mark.parametrize("apart", [False, True])
def test_a_right_cache_has_no_difference_in_either_layout(stored, tmp_path, capsys, apart):
    code, values, out = probe(capsys, Engine(stored, apart).save(tmp_path / "c"))
    assert code == 0
    assert values["differ"] == 0
    assert {one["store"]: one["entries"] for one in values["stores"]} == {WINDOW: 256, ENTRIES: 37 + 34, INDEXER: 37 + 34}
    assert max(one["worst"]["error"] for one in values["stores"]) == 0.0  # stored as the reference stores
    assert "entries against the reference's" in out


@pytest.mark.parametrize("store", [WINDOW, ENTRIES, INDEXER])
@pytest.mark.parametrize("apart", [False, True])
def test_a_swapped_page_is_named_with_what_it_holds(stored, tmp_path, capsys, store, apart):
    engine = Engine(stored, apart)
    table = engine.stores[store]["page_table"]
    table[1][0], table[1][1] = table[1][1], table[1][0]
    _, values, out = probe(capsys, engine.save(tmp_path / "c"))
    found = wrong_in(values)
    assert not any(found[other] for other in found if other != store)
    expected = {n % SLOTS if store == WINDOW else n for n in (range(9, 137) if store == WINDOW else range(34))} & set(range(2 * BLOCK))
    assert {w["entry"] for w in found[store]} == expected
    assert {w["row"] for w in found[store]} == {1}
    assert {(w["what"], w["shift"]) for w in found[store]} == {("another entry", BLOCK), ("another entry", -BLOCK)}
    first = found[store][0]
    assert first["page"] == table[1][0]
    assert f"page {first['page']} slot {first['slot']}" in out


@pytest.mark.parametrize("store", [WINDOW, ENTRIES, INDEXER])
def test_a_slot_off_by_one_is_named(stored, tmp_path, capsys, store):
    engine = Engine(stored)
    rows = stored[LAYER, store][0]
    for number in range(20, 30):
        engine.write(store, 0, number + 1, rows[number : number + 1])
    _, values, _ = probe(capsys, engine.save(tmp_path / "c"))
    wrong = [w for w in wrong_in(values)[store]]
    least = 150 - 128 if store == WINDOW else 0
    assert [w["entry"] for w in wrong] == [n for n in range(21, 31) if n >= least]
    assert {(w["what"], w["shift"]) for w in wrong} == {("another entry", -1)}


@pytest.mark.parametrize("store", [WINDOW, ENTRIES, INDEXER])
def test_scales_of_the_neighbour_are_named(stored, tmp_path, capsys, store):
    engine = Engine(stored)
    pairs = [n for n in (range(25, 140) if store == WINDOW else range(36)) if not torch.equal(engine.views(store, 0, n)[1], engine.views(store, 0, n + 1)[1])]
    number = pairs[0]
    engine.views(store, 0, number)[1].copy_(engine.views(store, 0, number + 1)[1])
    _, values, _ = probe(capsys, engine.save(tmp_path / "c"), "--above", "0.02")
    (wrong,) = wrong_in(values)[store]
    assert (wrong["entry"], wrong["what"], wrong["shift"]) == (number, "scale", 1)
    assert wrong["words"] == f"right codes under the scales of entry {number + 1}"


def test_one_fault_of_every_scale_of_a_page_is_told_as_one(tmp_path, capsys):
    """Some entries' halved scales are those of a neighbour by chance: what is true of all of them is said of all of them."""
    assert example.main([str(tmp_path / "c")]) == 0
    tensors = load_file(tmp_path / "c" / "cache.safetensors")
    tensors["swa.1"][3, :, 192] -= 1
    save_file(tensors, tmp_path / "c" / "cache.safetensors")
    _, values, out = probe(capsys, tmp_path / "c")
    wrong = values["stores"][1]["wrong"]
    assert len(wrong) == 16
    assert {(w["what"], w["words"], w["shift"]) for w in wrong} == {("scale", "right codes, scale of block 0 is 2^-1 off", None)}
    assert "under the scales of" not in out


def test_what_explains_most_entries_is_chosen_and_the_likelier_of_equals():
    near, halved, other = ("scale", "of entry 1", 1), ("scale", "2^-1", None), ("code", "3 of 9", None)
    assert _fewest({0: [near, halved], 1: [halved], 2: [other]}) == {0: halved, 1: halved, 2: other}
    assert _fewest({0: [near, halved]}) == {0: near}
    assert _fewest({0: [("scale", "of entry 1", 1), halved], 1: [("scale", "of entry 2", 1), ("scale", "2^-2", None)]}) == {0: near, 1: ("scale", "of entry 2", 1)}
    assert _fewest({}) == {}


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "F32"), (torch.bfloat16, "BF16"), (torch.int32, "int32")])
def test_a_tensor_that_is_no_bytes_is_refused(stored, tmp_path, capsys, dtype, name):
    directory = Engine(stored).save(tmp_path / "c")
    tensors = load_file(directory / "cache.safetensors")
    save_file(tensors | {WINDOW: tensors[WINDOW].to(dtype)}, directory / "cache.safetensors")
    assert kv_cache.main([str(directory), "--checkpoint", str(TINY)]) == 2
    err = capsys.readouterr().err.strip()
    assert f"layer 2 window: tensor 'window' is {name} {list(tensors[WINDOW].shape)}, expected bytes (uint8); next: " in err
    assert "\n" not in err


def test_a_plain_bf16_cache_is_packed_by_the_lines_of_the_page(tmp_path, capsys):
    page = (TINY.parents[1] / "docs" / "trace.md").read_text(encoding="utf-8")
    (code,) = [block.split("```")[0] for block in page.split("```python\n") if block.startswith("import json, torch") and "packed" in block.split("```")[0]]
    names: dict[str, Any] = {}
    exec(code, names)
    engine = open_engine(TINY, [0])
    state = engine.new_state(1, 150)
    with torch.no_grad():
        engine.prefill(torch.tensor([example.TOKENS]), state)
    keys = state["rings"][0]["keys"][0].bfloat16().unflatten(0, (-1, 16))
    names["dump"](keys, CONFIG.qk_rope_head_dim, [example.TOKENS], 0, [list(range(8))], tmp_path)
    code, values, _ = probe(capsys, tmp_path)
    assert (code, values["differ"], values["stores"][0]["entries"]) == (0, 0, 128)
    names["dump"](keys.roll(1, 1), CONFIG.qk_rope_head_dim, [example.TOKENS], 0, [list(range(8))], tmp_path)
    assert probe(capsys, tmp_path)[1]["differ"] == 128


def test_a_scale_off_by_powers_of_two_is_named_with_its_block(stored, tmp_path, capsys):
    engine = Engine(stored)
    engine.views(INDEXER, 1, 7)[1][2] += 3
    _, values, _ = probe(capsys, engine.save(tmp_path / "c"))
    (wrong,) = wrong_in(values)[INDEXER]
    assert (wrong["row"], wrong["entry"], wrong["what"], wrong["position"]) == (1, 7, "scale", 31)
    assert wrong["words"] == "right codes, scale of block 2 is 2^+3 off"


@pytest.mark.parametrize("store", [WINDOW, ENTRIES, INDEXER])
@pytest.mark.parametrize("as_if", [0, 3])
def test_a_rotary_part_for_another_position_is_named(stored, tmp_path, capsys, store, as_if):
    engine = Engine(stored)
    number, at = (140, 140) if store == WINDOW else (33, 132)
    turn = kv_cache.turning(CONFIG, read_cache(engine.save(tmp_path / "right"), CONFIG).pools[[WINDOW, ENTRIES, INDEXER].index(store)])
    moved = turn(stored[LAYER, store][0][number : number + 1], torch.tensor([as_if - at]))
    engine.write(store, 0, number, moved)
    _, values, _ = probe(capsys, engine.save(tmp_path / "c"))
    (wrong,) = wrong_in(values)[store]
    assert (wrong["entry"], wrong["what"]) == (number, "rotation")
    assert wrong["words"] == ("its rotary part is not rotated" if as_if == 0 else f"its rotary part is rotated for position {as_if}, expected {at}")


def test_a_stale_entry_a_hole_and_a_missing_page_are_named(stored, tmp_path, capsys):
    engine = Engine(stored)
    rows = list(stored[LAYER, WINDOW])
    engine.stores[WINDOW]["slots"] = 128  # a ring of the window's size: position p lies where p - 128 did
    engine.pages[WINDOW] = engine.pages[WINDOW][:, :8]
    engine.stores[WINDOW]["page_table"] = engine.pages[WINDOW].tolist()
    for b, values in enumerate(rows):
        for n in range(len(values)):
            slot = n % 128
            for into, data in zip(engine.views(WINDOW, b, slot), packed(WINDOW, values[n : n + 1]), strict=True):
                into.copy_(data[0])
    for into, data in zip(engine.views(WINDOW, 0, 140 % 128), packed(WINDOW, rows[0][12:13]), strict=True):
        into.copy_(data[0])  # position 140 was never stored
    engine.views(ENTRIES, 1, 5)[0].zero_()
    engine.stores[INDEXER]["page_table"][0][2] = -1
    code, values, _ = probe(capsys, engine.save(tmp_path / "c"))
    found = wrong_in(values)
    assert [(w["entry"], w["what"], w["words"]) for w in found[WINDOW]] == [(140, "stale", "it holds position 12, of 1 turn of the ring before")]
    assert [(w["row"], w["entry"], w["what"]) for w in found[ENTRIES]] == [(1, 5, "never written")]
    assert {(w["entry"], w["what"]) for w in found[INDEXER]} == {(n, "no page") for n in range(32, 37)}
    assert code == 0


def test_one_wrong_code_is_a_code(stored, tmp_path, capsys):
    engine = Engine(stored)
    codes = engine.views(ENTRIES, 0, 9)[0]
    largest = int(stored[LAYER, ENTRIES][0][9][:64].abs().argmax())
    codes[largest] ^= 0x80  # its sign
    _, values, _ = probe(capsys, engine.save(tmp_path / "c"), "--above", "0.05")
    (wrong,) = wrong_in(values)[ENTRIES]
    assert (wrong["entry"], wrong["what"]) == (9, "code")
    assert f"first at {largest}" in wrong["words"]


def test_a_stored_nan_is_a_difference(stored, tmp_path, capsys):
    engine = Engine(stored)
    engine.views(WINDOW, 0, 140)[0][3] = 0x7F
    _, values, _ = probe(capsys, engine.save(tmp_path / "c"))
    assert [w["entry"] for w in wrong_in(values)[WINDOW]] == [140]


def test_the_published_sizes_are_584_and_68_bytes():
    sizes = CONFIG.__class__.from_dir(TINY)
    object.__setattr__(sizes, "head_dim", 512)
    assert format_of(sizes, ENTRIES) == Format(448 + 128, 7, 584, 64, False)
    assert format_of(sizes, INDEXER) == Format(64, 4, 68, 64, True)


def test_turning_is_the_rotation_of_the_reference():
    values = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    turn = kv_cache.turning(CONFIG, named(ENTRIES))
    there = turn(values, torch.tensor([5, 6, 7]))
    assert not torch.allclose(there, values, atol=1e-2)
    assert torch.allclose(turn(there, -torch.tensor([5, 6, 7])), values, atol=1e-5)
    assert torch.equal(there[:, :64], values[:, :64])


CHANGES = {
    "no description": (lambda d: (d / "cache.json").unlink(), "no cache.json"),
    "broken JSON": (lambda d: (d / "cache.json").write_text("{"), "broken JSON"),
    "no tokens": (lambda d: edit(d, lambda m: m.pop("tokens")), "tokens: expected"),
    "a token out of range": (lambda d: edit(d, lambda m: m["tokens"][0].append(10**6)), "tokens: expected"),
    "no such layer": (lambda d: edit(d, lambda m: m["layers"].update({"99": {}})), "'99'"),
    "a store that the layer has not": (lambda d: edit(d, lambda m: m["layers"].update({"0": {"indexer": {}}})), "a window layer has window"),
    "an unknown key": (lambda d: edit(d, lambda m: m["layers"]["2"]["window"].update(blocksize=4)), "blocksize"),
    "no block size": (lambda d: edit(d, lambda m: m["layers"]["2"]["window"].pop("block_size")), "block_size None"),
    "another row count": (lambda d: edit(d, lambda m: m["layers"]["2"]["window"]["page_table"].pop()), "expected 2 rows"),
    "no such tensor": (lambda d: edit(d, lambda m: m["layers"]["2"]["window"].update(tensor="x")), "'x' is not in the file"),
    "a page outside": (lambda d: edit(d, lambda m: m["layers"]["2"]["entries"]["page_table"][0].__setitem__(0, 999)), "page 999 slot 15 lies at byte"),
    "truncated": (lambda d: (d / "cache.safetensors").write_bytes(b"12345678"), "truncated"),
    "missing": (lambda d: (d / "cache.safetensors").unlink(), "missing"),
}


def edit(directory, change):
    described = json.loads((directory / "cache.json").read_text())
    change(described)
    (directory / "cache.json").write_text(json.dumps(described))


@pytest.mark.parametrize("name", CHANGES)
def test_a_description_that_is_wrong_is_one_line_and_exit_2(stored, tmp_path, capsys, name):
    change, said = CHANGES[name]
    directory = Engine(stored).save(tmp_path / "c")
    change(directory)
    assert kv_cache.main([str(directory), "--checkpoint", str(TINY)]) == 2
    err = capsys.readouterr().err.strip()
    assert said in err
    assert "\n" not in err


def test_a_cache_without_an_entry_yet_is_not_measured(stored, tmp_path, capsys):
    directory = Engine(stored).save(tmp_path / "c")
    edit(directory, lambda m: (m.update(tokens=[[1, 2], [3]]), m["layers"]["2"].pop("window")))
    assert kv_cache.main([str(directory), "--checkpoint", str(TINY)]) == 3


def test_bytes_are_looked_at_and_not_only_their_names(stored, tmp_path):
    directory = Engine(stored).save(tmp_path / "c")
    assert load_file(directory / "cache.safetensors")[WINDOW].dtype is torch.uint8
    edit(directory, lambda m: m.update(schema=9))
    with pytest.raises(InputError, match="expected kind"):
        read_cache(directory, CONFIG)
