"""Documents: what is read from each kind of file, how they are split, what is asked of them."""

import json
import random
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miniseries import corpus
from miniseries.corpus import Document, Findings, Passage, find_passages, make_questions


def read(tmp_path, *patterns, **options):
    """Texts of files below tmp_path, and what was found on the way."""
    findings = Findings()
    paths = [str(tmp_path / pattern) for pattern in patterns]
    dataset = {"source": "files", "paths": paths, **options}
    return [document.text for document in corpus.read_documents(dataset, findings)], findings


def test_a_document_is_held_out_by_its_sha256_alone():
    # sha256("") starts with e3b0c442 (0.8894), sha256("abc") with ba7816bf (0.7284)
    assert corpus.is_validation("", 0.89) and not corpus.is_validation("", 0.88)
    assert corpus.is_validation("abc", 0.73) and not corpus.is_validation("abc", 0.72)


def test_about_the_asked_share_is_held_out():
    num_held_out = sum(corpus.is_validation(str(i), 0.1) for i in range(10_000))
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
    assert findings.num_bad_lines == 7
    places = [line.removeprefix(str(tmp_path)) for line in findings.bad_lines]
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
    assert texts == ["a", "b"] and findings.num_bad_lines == 1
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
    with pytest.raises(ValueError, match="source 'web' has no text"):
        list(corpus.read_documents({"source": "web"}, Findings()))


def test_lone_surrogates_become_the_replacement_sign_and_nothing_else_changes(tmp_path):
    lines = [r'{"text": "lone \ud83d here"}', r'{"text": "pair \ud83d\ude00"}']
    lines += [r'{"text": "nul \u0000 and <|endoftext|>"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    texts, findings = read(tmp_path, "a.jsonl")
    assert texts == ["lone \ufffd here", "pair \U0001f600", "nul \0 and <|endoftext|>"]
    assert findings.num_repaired == 1


def test_equal_and_empty_documents_are_left_out(tmp_path):
    lines = [json.dumps({"text": text}) for text in ["a", " \n", "b", "a", "", "a"]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    texts, findings = read(tmp_path, "a.jsonl")
    assert texts == ["a", "b"]
    assert (findings.num_documents, findings.num_duplicates) == (2, 2)


def test_docstrings_come_in_the_order_of_the_source(tmp_path):
    source = '"""Module."""\nclass A:\n    """Class.\n\n    Deep."""\n    def f(self):\n'
    source += '        """Method."""\ndef g():\n    """Function."""\nx = """no docstring"""\n'
    (tmp_path / "m.py").write_text(source)
    assert corpus.module_docstrings(tmp_path / "m.py") == [
        "Module.",
        "Class.\n\nDeep.",
        "Method.",
        "Function.",
    ]
    (tmp_path / "bad.py").write_text("def (")
    assert corpus.module_docstrings(tmp_path / "bad.py") == []


def test_each_docstring_of_a_folder_comes_once_and_tests_are_skipped(tmp_path):
    for name, text in [
        ("b.py", '"""Same."""'),
        ("a/__init__.py", '"""Same."""\ndef f():\n    """Own."""'),
        ("test/c.py", '"""Test."""'),
        ("site-packages/d.py", '"""Installed."""'),
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    documents = list(corpus._docstrings_of_folder(tmp_path, set()))
    assert documents == [("a", "Same.\n\nOwn.")]


def test_parallel_reading_gives_the_same_docstrings(tmp_path, monkeypatch):
    paths = []
    for number in range(60):
        paths.append(tmp_path / f"m{number}.py")
        paths[-1].write_text(f'"""Text {number}."""')
    monkeypatch.setattr(corpus, "PARALLEL_MODULES", 10)
    assert list(corpus._parse_modules(paths)) == [[f"Text {number}."] for number in range(60)]


def test_the_language_reference_comes_first_and_by_name():
    names = [document.name for document in islice(corpus.builtin_documents(), 70)]
    assert "topic assert" in names and names == sorted(names)


def test_passages_are_whole_sentences_and_code_is_left_out():
    text = (
        "The first sentence has seven words here. The second one is a bit\nlonger than that. "
        "Too short. Now comes one that stands alone.\n\n"
        "    for x in {1, 2}: print(x | y)\n\n"
        "Here is another block of text. It has two whole sentences in it."
    )
    assert list(find_passages(Document("n", text))) == [
        Passage(
            "n",
            "The first sentence has seven words here.",
            "The second one is a bit longer than that.",
        ),
        Passage("n", "Here is another block of text.", "It has two whole sentences in it."),
    ]


def test_questions_hold_the_true_ending_at_the_label_and_others_from_elsewhere():
    passages = [
        Passage(f"d{i // 2}", f"Context number {i}.", f"This is ending {i:03d}.") for i in range(90)
    ]
    true = {passage.context: passage for passage in passages}
    source = {passage.ending: passage.name for passage in passages}
    questions = make_questions(passages, num_questions=50)
    assert len(questions) == 50
    assert [question["ind"] for question in questions] == list(range(50))
    assert {question["label"] for question in questions} == {0, 1, 2, 3}
    for question in questions:
        passage = true[question["ctx"]]
        endings, label = question["endings"], question["label"]
        assert endings[label] == passage.ending
        assert len(set(endings)) == 4
        others = [source[ending] for i, ending in enumerate(endings) if i != label]
        assert passage.name not in others
        assert not any(ending.startswith(" ") for ending in endings)
        assert question["ctx_a"] == question["ctx"] and question["ctx_b"] == ""
        assert question["activity_label"] == passage.name
    assert make_questions(passages, 50) == questions
    assert make_questions(passages, 50, seed=1) != questions


def test_wrong_endings_are_about_as_long_as_the_true_one():
    generator = random.Random(0)
    passages = [
        Passage(f"d{i}", f"Context {i}.", f"{i:04d}" + "x" * generator.randrange(300))
        for i in range(2000)
    ]
    for question in make_questions(passages, 100):
        lengths = [len(ending) for ending in question["endings"]]
        assert max(lengths) - min(lengths) < 20


def test_text_without_prose_still_gives_questions():
    generator = random.Random(0)
    code = "".join(generator.choice("abcdef=()\n ") for _ in range(3000))
    passages = list(corpus.slice_passages(Document("code", code)))
    assert len(passages) > 10 and make_questions(passages, 5)[4]["ind"] == 4
    assert make_questions([], 5) == []
