"""The prose of Python: which docstrings, in which order."""

from itertools import islice

from miniseries.data import prose


def test_docstrings_come_in_the_order_of_the_source(tmp_path):
    source = '"""Module."""\nclass A:\n    """Class.\n\n    Deep."""\n    def f(self):\n'
    source += '        """Method."""\ndef g():\n    """Function."""\nx = """no docstring"""\n'
    (tmp_path / "m.py").write_text(source)
    assert prose.module_docstrings(tmp_path / "m.py") == [
        "Module.",
        "Class.\n\nDeep.",
        "Method.",
        "Function.",
    ]
    (tmp_path / "bad.py").write_text("def (")
    assert prose.module_docstrings(tmp_path / "bad.py") == []


def test_each_docstring_of_a_folder_comes_once_and_tests_are_skipped(tmp_path):
    for name, text in [
        ("b.py", '"""Same."""'),
        ("a/__init__.py", '"""Same."""\ndef f():\n    """Own."""'),
        ("test/c.py", '"""Test."""'),
        ("site-packages/d.py", '"""Installed."""'),
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    documents = list(prose._docstrings_of_folder(tmp_path, set()))
    assert documents == [("a", "Same.\n\nOwn.")]


def test_parallel_reading_gives_the_same_docstrings(tmp_path, monkeypatch):
    paths = []
    for number in range(60):
        paths.append(tmp_path / f"m{number}.py")
        paths[-1].write_text(f'"""Text {number}."""')
    monkeypatch.setattr(prose, "PARALLEL_MODULES", 10)
    assert list(prose._parse_modules(paths)) == [[f"Text {number}."] for number in range(60)]


def test_the_language_reference_comes_first_and_by_name():
    names = [name for name, _ in islice(prose.builtin_documents(), 70)]
    assert "topic assert" in names and names == sorted(names)


def test_equal_texts_of_the_language_reference_come_once(monkeypatch):
    topics = prose.importlib.import_module("pydoc_data.topics").topics
    monkeypatch.setitem(topics, "zzz", topics["assert"])
    monkeypatch.setattr(prose, "_docstrings_of_folder", lambda root, seen: iter(()))
    texts = [text for _, text in prose.builtin_documents()]
    assert topics["assert"] in texts and len(set(texts)) == len(texts)
