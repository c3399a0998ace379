"""Documents: what is read from each kind of file, in which parts, and how they are split."""

import gzip
import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miniseries.data import corpus
from miniseries.data.corpus import Findings, Part, Piece, is_validation, plan_parts, read_part


def read(tmp_path, *patterns, **options):
    """Texts of files below tmp_path, and what was found on the way."""
    findings = Findings()
    paths = [str(tmp_path / pattern) for pattern in patterns]
    dataset = {"source": "files", "paths": paths, **options}
    documents = [d for part in plan_parts(dataset) for d in read_part(part, dataset, findings)]
    return [document.text for document in documents], findings


def test_a_document_is_held_out_by_its_sha256_alone():
    # sha256("") starts with e3b0c442 (0.8894), sha256("abc") with ba7816bf (0.7284)
    empty, abc = (hashlib.sha256(text).digest() for text in (b"", b"abc"))
    assert is_validation(empty, 0.89) and not is_validation(empty, 0.88)
    assert is_validation(abc, 0.73) and not is_validation(abc, 0.72)


def test_about_the_asked_share_is_held_out():
    num_held_out = sum(
        is_validation(hashlib.sha256(b"%d" % i).digest(), 0.1) for i in range(10_000)
    )
    assert 900 < num_held_out < 1100  # 10 standard deviations are 300


def test_each_text_file_is_a_document(tmp_path):
    (tmp_path / "b.txt").write_text("two\n\nblocks")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.txt").write_text("deep")
    assert read(tmp_path, "*.txt")[0] == ["one", "two\n\nblocks"]
    assert read(tmp_path, "**/*.txt", "a.txt")[0] == ["one", "two\n\nblocks", "deep"]
    assert read(tmp_path, "a.txt", split="file")[0] == ["one"]


def test_a_large_text_is_split_at_blank_lines_which_stay_with_the_block_before(tmp_path):
    (tmp_path / "a.txt").write_text("First:\nspeak\n\nSecond:\nno\n\n\n\nlast")
    texts, _ = read(tmp_path, "a.txt", split="blank_lines")
    assert texts == ["First:\nspeak\n\n", "Second:\nno\n\n", "last"]


def test_text_that_is_not_utf8_is_refused_by_name(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 noir")
    with pytest.raises(ValueError, match=r"a\.txt: not UTF-8"):
        read(tmp_path, "a.txt")


def test_bad_json_lines_are_counted_and_the_first_ones_named(tmp_path):
    lines = ['{"text": "good"}', "", '{"text": "cut', '{"other": "x"}', "[1]", '{"text": 5}']
    lines += ["nonsense"] * 3 + ['{"text": "fine"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    texts, findings = read(tmp_path, "*.jsonl")
    assert texts == ["good", "fine"]
    assert findings.num_bad == 7
    places = [line.removeprefix(str(tmp_path)) for line in findings.bad]
    assert places == [
        "/a.jsonl:3: not JSON",
        "/a.jsonl:4: no text under 'text'",
        "/a.jsonl:5: no text under 'text'",
        "/a.jsonl:6: no text under 'text'",
        "/a.jsonl:7: not JSON",
    ]


def test_a_wrong_text_key_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n')
    assert read(tmp_path, "a.jsonl", text_key="content")[0] == ["x"]
    with pytest.raises(ValueError, match=r"a\.jsonl: no line has a text under 'text'"):
        read(tmp_path, "a.jsonl")


def test_parquet_is_read_by_column_and_rows_without_text_are_counted(tmp_path):
    pq.write_table(pa.table({"id": [1, 2, 3], "body": ["a", None, "b"]}), tmp_path / "a.parquet")
    texts, findings = read(tmp_path, "a.parquet", text_key="body")
    assert texts == ["a", "b"] and findings.num_bad == 1
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'text'.*it has id, body"):
        read(tmp_path, "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"b\.parquet: cannot be read"):
        read(tmp_path, "b.parquet")


def test_a_pattern_without_files_or_of_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no file matches '.*nothing\.txt'"):
        read(tmp_path, "nothing.txt")
    (tmp_path / "a.pdf").write_text("")
    with pytest.raises(ValueError, match=r"a\.pdf: unknown kind of file.*\.txt, \.jsonl"):
        read(tmp_path, "a.*")
    (tmp_path / "b.parquet.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"b\.parquet\.gz: unknown kind of file"):
        read(tmp_path, "b.*")


def test_lone_surrogates_become_the_replacement_sign_and_nothing_else_changes(tmp_path):
    lines = [r'{"text": "lone \ud83d here"}', r'{"text": "pair \ud83d\ude00"}']
    lines += [r'{"text": "nul \u0000 and <|endoftext|>"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    texts, findings = read(tmp_path, "a.jsonl")
    assert texts == ["lone \ufffd here", "pair \U0001f600", "nul \0 and <|endoftext|>"]
    assert findings.num_repaired == 1


def test_empty_documents_are_left_out_and_equal_ones_stay(tmp_path):
    lines = [json.dumps({"text": text}) for text in ["a", " \n", "b", "a", "", "\u00a0", "a"]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    texts, findings = read(tmp_path, "a.jsonl")
    assert texts == ["a", "b", "a", "a"]
    assert findings.num_empty == 3


def test_an_empty_file_holds_no_document(tmp_path):
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_bytes(b"")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "c.parquet")
    texts, findings = read(tmp_path, "*")
    assert texts == [] and findings.num_bad == 0


def test_line_ends_and_nul_stay_and_a_byte_order_mark_goes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\0\r")
    assert read(tmp_path, "a.txt")[0] == ["one\r\n\r\ntwo\0\r"]
    blocks, _ = read(tmp_path, "a.txt", split="blank_lines")
    assert blocks == ["one\r\n\r\n", "two\0\r"]
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x\\u0000"}\r\n{"text": "y"}\r\n')
    assert read(tmp_path, "a.jsonl")[0] == ["x\0", "y"]


def test_invalid_utf8_is_a_bad_line_or_row_and_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n{"text": "caf\xe9"}\n')
    texts, findings = read(tmp_path, "a.jsonl")
    assert texts == ["good"] and findings.bad == [f"{tmp_path}/a.jsonl:2: not JSON"]
    rows = pa.array([b"good", b"caf\xe9"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
    texts, findings = read(tmp_path, "a.parquet")
    assert texts == ["good"] and findings.bad == [f"{tmp_path}/a.parquet:2: not UTF-8"]


def test_a_column_of_numbers_is_refused(tmp_path):
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: column 'text' holds int64, not text"):
        read(tmp_path, "a.parquet")


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_packed_files_are_read_like_plain_ones_and_a_cut_one_is_named(tmp_path, packing):
    content = b"".join(b'{"text": "number %d"}\n' % i for i in range(20_000))
    half = len(content) // 2
    pack = (
        gzip.compress if packing == "gz" else lambda data: pa.compress(data, "zstd", asbytes=True)
    )
    path = tmp_path / f"a.jsonl.{packing}"
    path.write_bytes(pack(content[:half]) + pack(content[half:]))  # as `cat` of two such files
    assert read(tmp_path, "a.*")[0] == [f"number {i}" for i in range(20_000)]
    (tmp_path / f"b.txt.{packing}").write_bytes(pack("é".encode()))
    assert read(tmp_path, "b.*")[0] == ["é"]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"a\.jsonl\.{packing}: cannot be read"):
        read(tmp_path, "a.*")


def test_large_files_are_cut_into_parts_and_no_line_is_lost_or_doubled(tmp_path, monkeypatch):
    lines = [json.dumps({"text": f"{i} " + "x" * (i * 7 % 90)}) for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[:50]))  # no line end at the end
    table = pa.table({"text": [f"row {i}" for i in range(100)]})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=7)
    whole, _ = read(tmp_path, "*")
    assert len(whole) == 450
    for num_bytes in (1, 60, 999, 5_000):
        monkeypatch.setattr(corpus, "PART_BYTES", num_bytes)
        assert read(tmp_path, "*")[0] == whole, num_bytes
    dataset = {"source": "files", "paths": [str(tmp_path / "*")]}
    monkeypatch.setattr(corpus, "PART_BYTES", 4_000)
    parts = plan_parts(dataset)
    assert len(parts) > 4
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:200] + ["bad"]) + "\n")
    findings = Findings()
    for part in plan_parts(dataset):
        list(read_part(part, dataset, findings))
    place = sum(len(line) + 1 for line in lines[:200])
    assert findings.bad == [f"{tmp_path}/a.jsonl:byte {place}: not JSON"]


def test_small_files_share_a_part_and_held_out_ones_have_their_own(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name)
    dataset = {"source": "files", "paths": [f"{tmp_path}/*.txt"], "val_paths": [f"{tmp_path}/c*"]}
    pieces = {name: Piece(f"{tmp_path}/{name}.txt") for name in "abcd"}
    assert plan_parts(dataset) == [
        Part((pieces["c"],), "val"),
        Part((pieces["a"], pieces["b"], pieces["d"]), "train"),
    ]
    assert plan_parts(dataset | {"val_paths": []}) == [Part(tuple(pieces.values()), None)]


def test_a_huge_text_as_one_document_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_TEXT_BYTES", 10)
    (tmp_path / "a.txt").write_text("12345\n\n123456")
    with pytest.raises(ValueError, match=r"a\.txt: more than 10 characters.*blank_lines"):
        read(tmp_path, "a.txt")
    assert len(read(tmp_path, "a.txt", split="blank_lines")[0]) == 2
    (tmp_path / "a.txt").write_text("12345\n\n123456\n7890\n")
    with pytest.raises(ValueError, match=r"a\.txt:3: more than 10 characters without a blank"):
        read(tmp_path, "a.txt", split="blank_lines")


def test_a_file_without_line_ends_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_TEXT_BYTES", 10)
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(ValueError, match=r"a\.txt:1: more than 10 characters without a blank"):
        read(tmp_path, "a.txt", split="blank_lines")
    (tmp_path / "a.jsonl").write_text(json.dumps([{"text": "x"}] * 9))
    for piece in (Piece(f"{tmp_path}/a.jsonl"), Piece(f"{tmp_path}/a.jsonl", 20, 30)):
        with pytest.raises(ValueError, match=r"a\.jsonl: a line of more than 10 bytes"):
            list(corpus._lines(piece))


def test_a_held_out_file_is_not_trained_on_by_whatever_way_it_is_reached(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "c.txt").symlink_to(tmp_path / "b.txt")
    monkeypatch.chdir(tmp_path)
    paths = ["*.txt", f"{tmp_path}/*.txt", "./a.txt"]
    dataset = {"source": "files", "paths": paths, "val_paths": ["./b.txt"]}
    held_out, trained_on = plan_parts(dataset)
    assert held_out == Part((Piece("./b.txt"),), "val")
    (piece,) = trained_on.pieces
    assert (tmp_path / piece.path).resolve() == tmp_path / "a.txt"
