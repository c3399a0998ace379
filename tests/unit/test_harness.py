"""lm-evaluation-harness on an export: the numbers of our own scoring, and of these weights."""

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from test_evaluation import made_questions
from test_export import change_json, make_data, make_run, trained_model

from miniseries.evaluation import harness
from miniseries.evaluation.export import export_model
from miniseries.evaluation.harness import leaderboard_mean, local_files, parse_task, run_harness
from miniseries.evaluation.scores import score_export
from miniseries.metrics import read_json

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_task_may_state_its_number_of_examples():
    assert parse_task("hellaswag") == ("hellaswag", 0)
    assert parse_task("arc_challenge@25") == ("arc_challenge", 25)
    for text in ("hellaswag@", "hellaswag@ten", "@5", ""):
        if text == "hellaswag@":
            assert parse_task(text) == ("hellaswag", 0)
            continue
        with pytest.raises(ValueError, match="is no task; write hellaswag"):
            parse_task(text)


def test_a_task_twice_is_refused_since_a_file_has_one_score_of_it(tmp_path):
    assert harness.parse_tasks(["hellaswag@10", "mmlu"]) == [("hellaswag", 10), ("mmlu", 0)]
    twice = ["hellaswag", "mmlu", "hellaswag@10"]
    with pytest.raises(ValueError, match=r"^hellaswag: more than once among the tasks"):
        run_harness(tmp_path, twice, tmp_path / "o", tmp_path / "i", 1)
    (tmp_path / "o").write_text('{"tasks": {"hellaswag": {}, "mmlu": {}}}')
    with pytest.raises(ValueError, match=r"^hellaswag: more than once among the tasks"):
        harness.check_tasks(twice, tmp_path / "o")


def test_scores_are_checked_only_when_other_tasks_are_wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    scores = {"tasks": {"hellaswag": {}, "piqa": {}}}
    (tmp_path / "old").write_text(json.dumps(scores))
    (tmp_path / "new").write_text(json.dumps(scores | {"asked": ["hellaswag", "piqa"]}))
    for name in ("none", "old", "new"):
        harness.check_tasks(["hellaswag", "piqa"], tmp_path / name)
    for name, tasks in (("old", ["hellaswag", "mmlu"]), ("new", ["hellaswag"])):
        with pytest.raises(ValueError, match="lm_eval is not installed"):
            harness.check_tasks(tasks, tmp_path / name)


def test_data_on_this_machine_come_before_those_of_the_hub(tmp_path):
    questions = tmp_path / "hellaswag.jsonl"
    questions.touch()
    assert local_files("hellaswag", 0, None, questions) == {}  # none could be made of the text
    questions.write_text("{}")
    (tmp_path / "hellaswag").mkdir()
    for task_data in (None, tmp_path):
        assert local_files("hellaswag", 0, task_data, questions) == {"validation": str(questions)}
    (tmp_path / "hellaswag").rmdir()
    assert local_files("hellaswag", 10, None, questions) == {}
    assert local_files("gsm8k", 0, tmp_path, questions) == {}
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("{}")
    files = local_files("gsm8k", 5, tmp_path, questions)
    assert files == {s: str(tmp_path / "gsm8k" / f"{s}.jsonl") for s in ("train", "test")}


def test_the_leaderboard_s_mean_takes_its_own_figure_of_each_of_the_six():
    # llm.c's 774M: ARC 30.46, HellaSwag 57.81, MMLU 25.87, TruthfulQA 35.79, Winogrande 59.35,
    # GSM8K 0.15; published mean 34.90
    tasks = {
        "arc_challenge": {"acc": 0.2, "acc_norm": 0.3046},
        "hellaswag": {"acc": 0.4, "acc_norm": 0.5781},
        "mmlu": {"acc": 0.2587},
        "truthfulqa_mc2": {"acc": 0.3579},
        "winogrande": {"acc": 0.5935},
        "gsm8k": {"exact_match_strict-match": 0.0015, "exact_match_flexible-extract": 0.02},
    }
    assert leaderboard_mean(tasks) == pytest.approx(0.3490, abs=1e-4)
    assert leaderboard_mean({k: v for k, v in tasks.items() if k != "mmlu"}) is None
    subjects = {"mmlu_a": {"acc": 0.2, "num_items": 900}, "mmlu_b": {"acc": 0.4, "num_items": 100}}
    subjects["mmlu_stem"] = {"acc": 0.9, "num_items": None}  # a group of some of them
    assert leaderboard_mean(tasks | subjects) == pytest.approx(
        0.3490 + (0.3 - 0.2587) / 6, abs=1e-4
    )


def test_a_question_with_two_filters_is_one_question_and_two_lines():
    sample = {"doc_id": 7, "target": "4", "filtered_resps": ["4"], "metrics": ["exact_match"]}
    filters = ("strict-match", "flexible-extract")
    samples = [sample | {"filter": name, "exact_match": 1.0} for name in filters]
    lines = [json.loads(line) for line in harness._items("gsm8k", samples)]
    assert [line["filter"] for line in lines] == list(filters)
    (plain,) = harness._items("piqa", [sample | {"filter": "none", "exact_match": 1.0}])
    assert "filter" not in json.loads(plain)


def test_without_lm_eval_the_remedy_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -c constraints\.txt '\.\[harness\]'"):
        run_harness(tmp_path, ["hellaswag"], tmp_path / "o", tmp_path / "i", 1)


@pytest.fixture
def exported(tmp_path):
    run = make_run(tmp_path / "train" / "small", trained_model())
    export_model(run / "done.json", tmp_path / "export" / "small")
    return tmp_path / "export" / "small"


def run(export, folder, tasks=("hellaswag",), **options):
    run_harness(
        export, list(tasks), folder / "harness.json", folder / "items.jsonl", 4, device="cpu",
        **options
    )  # fmt: skip
    lines = (folder / "items.jsonl").read_text().splitlines()
    return read_json(folder / "harness.json"), [json.loads(line) for line in lines]


@pytest.fixture
def fake(monkeypatch):
    """lm_eval's three entries; notes what is done in which order, and has no data of gsm8k."""
    done, groups = [], {"mmlu": ["mmlu_law"]}

    class Manager:
        task_index = dict.fromkeys(("arc_easy", "gsm8k", "mmlu", "mmlu_law"))

        def load(self, specs):
            done.append(("load", specs[0]))
            if specs == ["gsm8k"]:
                raise ConnectionError("no data set\nmore lines")
            held = groups.get(specs[0])
            return {"tasks": dict.fromkeys(held or specs), "groups": specs if held else {}}

    def evaluate(tasks, **_options):
        done.append(("score", tasks[0]))
        return {"results": {tasks[0]: {"acc,none": 0.5}}, "samples": {tasks[0]: []}}

    contents = {
        "lm_eval": {"simple_evaluate": evaluate, "__version__": "0"},
        "lm_eval.tasks": {"TaskManager": Manager},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": lambda **options: done.append(("model", options))},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content, __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    return done


def test_missing_data_of_the_last_task_are_found_before_the_first_is_scored(
    tmp_path, exported, fake
):
    with pytest.raises(ValueError, match=r"^lm-eval's gsm8k: ConnectionError: no data set$"):
        run(exported, tmp_path, ["arc_easy", "gsm8k@5"])
    assert fake == [("load", "arc_easy"), ("load", "gsm8k")]


def test_a_task_beside_the_group_that_holds_it_is_refused(tmp_path, exported, fake):
    with pytest.raises(ValueError, match=r"^mmlu and mmlu_law both hold mmlu_law; leave one"):
        run(exported, tmp_path, ["mmlu", "mmlu_law@5"])
    assert "score" not in dict(fake)


def test_lm_eval_takes_the_length_that_was_trained_not_the_positions(tmp_path, exported, fake):
    change_json(exported / "config.json", n_positions=64, sequence_length=32)
    found, _ = run(exported, tmp_path, ["arc_easy@3"])
    assert dict(fake)["model"]["max_length"] == 32
    assert dict(fake)["model"]["softmax_dtype"] == "float32"
    scores = {"shots": 3, "num_items": 0, "data": "hub", "acc": 0.5}
    assert found["tasks"] == {"arc_easy": scores}


@pytest.mark.slow
def test_lm_eval_and_our_scoring_agree_on_every_item_and_on_other_weights_differ(
    tmp_path, exported, offline
):
    pytest.importorskip("lm_eval")
    data, count = make_data(tmp_path), 240
    questions = made_questions(data / "q.jsonl", count)
    outputs = [tmp_path / name for name in ("loss.json", "hellaswag.json", "ours.jsonl")]
    score_export(exported, data / "manifest.json", questions, 4, *outputs, device="cpu")
    found, items = run(exported, tmp_path, questions=questions)
    ours = read_json(outputs[1])["harness"]
    scores = found["tasks"]["hellaswag"]
    assert (scores["num_items"], scores["shots"], scores["data"]) == (count, 0, "local")
    for theirs, key in (("acc", "acc"), ("acc_norm", "acc_characters")):
        assert scores[theirs] == ours[key]
        assert scores[f"{theirs}_stderr"] == pytest.approx(ours[f"{key}_stderr"], rel=1e-6)
    lines = [json.loads(line)["harness"] for line in outputs[2].read_text().splitlines()]
    assert len(items) == len(lines) == count
    for theirs, line in zip(items, lines, strict=True):
        losses = [-log_likelihood for log_likelihood, _ in theirs["answers"]]
        assert losses == pytest.approx(line["nats"], abs=2e-3)
        assert theirs["target"] == line["label"]
        answer = min(range(4), key=line["nats"].__getitem__)
        assert theirs["acc"] == float(answer == line["label"])
    # other weights in the same folder: other scores, and the file says whose they are
    run_b = make_run(tmp_path / "train" / "other", trained_model(seed=9))
    export_model(run_b / "done.json", exported)
    again, other_items = run(exported, tmp_path, questions=questions)
    assert again["weights_sha256"] != found["weights_sha256"]
    assert [i["answers"] for i in other_items] != [i["answers"] for i in items]


@pytest.mark.slow
def test_lm_eval_adds_up_what_a_model_in_bf16_says_in_fp32(tmp_path, offline):
    pytest.importorskip("lm_eval")
    export, data = tmp_path / "export" / "small", make_data(tmp_path)
    made = make_run(tmp_path / "train" / "small", trained_model())
    export_model(made / "done.json", export, "bfloat16")
    questions = made_questions(data / "q.jsonl", 60)
    outputs = [tmp_path / name for name in ("loss.json", "hellaswag.json", "ours.jsonl")]
    score_export(export, data / "manifest.json", questions, 4, *outputs, device="cpu")
    _, items = run(export, tmp_path, questions=questions)
    lines = [json.loads(line)["harness"]["nats"] for line in outputs[2].read_text().splitlines()]
    theirs = [[-log_likelihood for log_likelihood, _ in item["answers"]] for item in items]
    apart = max(
        abs(a - b) for x, y in zip(theirs, lines, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert max(map(max, lines)) > 64, "sums that bf16 rounds to a half"
    assert apart < 0.2


@pytest.mark.slow
def test_unknown_tasks_and_missing_data_are_told_in_one_line(
    tmp_path, exported, offline, monkeypatch
):
    pytest.importorskip("lm_eval")
    with pytest.raises(ValueError, match="lm-eval has no task helaswag"):
        run(exported, tmp_path, ["helaswag"])
    (tmp_path / "hellaswag").mkdir()
    (tmp_path / "hellaswag" / "validation.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="lm-eval's hellaswag: ") as caught:
        run(exported, tmp_path, task_data=tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "harness.json").exists()
