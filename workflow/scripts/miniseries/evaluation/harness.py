"""Eleuther's lm-evaluation-harness on an exported model, offline where the data are here.

lm_eval is the extra `harness` of this project. Nothing of it is cached from one model to the next:
its cache of answers knows only the prompts.
"""

import importlib.util
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from miniseries.evaluation.huggingface import read_config, weights_sha256
from miniseries.metrics import read_json, write_json, write_text
from miniseries.training.distributed import choose_device

# The figure of each task that the first Open LLM Leaderboard published and took the mean of
LEADERBOARD_METRICS = {
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    "mmlu": "acc",
    "truthfulqa_mc2": "acc",
    "winogrande": "acc",
    "gsm8k": "exact_match",
}


class ReadyTask(NamedTuple):
    """A task whose data are here: its local files, if any, and what lm-eval loads it by."""

    name: str
    shots: int
    files: dict[str, str]
    spec: str


def parse_task(text: str) -> tuple[str, int]:
    """Task and number of examples of `hellaswag` (0) or `hellaswag@10`.

    Raises:
        ValueError: the number is none.
    """
    task, _, shots = text.partition("@")
    if not task or (shots and not shots.isdecimal()):
        raise ValueError(f"{text!r} is no task; write hellaswag, or hellaswag@10 for 10 examples")
    return task, int(shots or 0)


def parse_tasks(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Each task and its number of examples.

    Raises:
        ValueError: as `parse_task`; a task twice, of which one score would displace the other.
    """
    tasks = [parse_task(text) for text in texts]
    names = [name for name, _ in tasks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{', '.join(twice)}: more than once among the tasks, but a file of scores holds a "
            "task once; leave one of them"
        )
    return tasks


def local_files(
    task: str, shots: int, task_data: Path | None, questions: Path | None
) -> dict[str, str]:
    """Data files of a task by split; none if lm-eval is to take those of the hub.

    HellaSwag without examples takes the questions that the run itself was scored on, if there are
    any.

    Args:
        task_data: folder with {task}/{split}.jsonl or .parquet.
    """
    if task == "hellaswag" and shots == 0 and questions and questions.stat().st_size:
        return {"validation": str(questions.resolve())}
    folder = task_data / task if task_data else None
    if folder and folder.is_dir():
        files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.parquet")])
        return {path.stem: str(path.resolve()) for path in files}
    return {}


def _local_task(stock: Path, task: str, files: dict[str, str], folder: Path) -> str:
    """A task like lm-eval's own but on local files; returns the path of its description."""
    kind = "parquet" if all(name.endswith(".parquet") for name in files.values()) else "json"
    content = {
        "include": str(stock),
        "task": task,
        "dataset_path": kind,
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
        "training_split": "train" if "train" in files else None,
    }
    path = folder / f"{task}.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def _scores(results: dict[str, Any]) -> dict[str, float]:
    """The figures of one task: lm-eval's `acc,none` as acc, other filters with their name."""
    scores = {}
    for key, value in results.items():
        metric, comma, filtered_by = key.partition(",")
        if comma and isinstance(value, int | float):
            scores[metric if filtered_by == "none" else f"{metric}_{filtered_by}"] = value
    return scores


def _items(task: str, samples: list[dict[str, Any]]) -> Iterator[str]:
    """One line for each question, and filter where there are several, as of gsm8k.

    It has every answer's log-likelihood or text, and how it counted.
    """
    for sample in samples:
        counted = {name: sample[name] for name in sample["metrics"]}
        answers = [list(a) if isinstance(a, tuple) else a for a in sample["filtered_resps"]]
        line = {"task": task, "item": sample["doc_id"], "target": sample["target"]}
        kept_by = sample.get("filter", "none")
        line |= {"filter": kept_by} if kept_by != "none" else {}
        yield json.dumps({**line, "answers": answers, **counted}, default=str)


def leaderboard_mean(tasks: dict[str, dict[str, Any]]) -> float | None:
    """Mean of the six tasks' published figures, a share from 0 to 1; None if one is missing.

    MMLU's is the mean of its subjects; lm-eval's own weighs them by their questions.
    """
    found = []
    for task, metric in LEADERBOARD_METRICS.items():
        scores = tasks.get(task, {})
        subjects = [s for name, s in tasks.items() if name.startswith("mmlu_") and s["num_items"]]
        if task == "mmlu" and subjects:
            scores = {metric: sum(s[metric] for s in subjects) / len(subjects)}
        names = [name for name in (metric, f"{metric}_strict-match") if name in scores]
        if not names:
            return None
        found.append(scores[names[0]])
    return sum(found) / len(found)


def check_tasks(tasks: Sequence[str], scores: Path) -> None:
    """Refuse tasks that cannot be scored, before scores that there are make way for them.

    Args:
        scores: what `run_harness` wrote before; if it does not exist there is nothing to lose.

    Raises:
        ValueError: as `run_harness` if the scores are of other tasks than these.
    """
    if not scores.exists():
        return
    content, wanted = read_json(scores), [task for task, _ in parse_tasks(tasks)]
    if "asked" not in content:  # made before they were noted
        wanted = [task for task in wanted if task not in content["tasks"]]
    if content.get("asked") != list(tasks):
        _task_manager(wanted)


def _task_manager(names: Sequence[str]) -> Any:
    """lm-eval's catalogue, None if no name is asked for."""
    if not names:
        return None
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            "lm_eval is not installed: .venv/bin/pip install -c constraints.txt '.[harness]'"
        )
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    unknown = [name for name in names if name not in manager.task_index]
    if unknown:
        raise ValueError(f"lm-eval has no task {', '.join(unknown)}; `lm_eval ls tasks` lists them")
    return manager


@contextmanager
def _told(task: str) -> Iterator[None]:
    """Tell what goes wrong in one line that names the task."""
    try:
        yield
    except Exception as error:  # lm-eval, datasets and the hub raise dozens of kinds
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"lm-eval's {task}: {type(error).__name__}: {reason}") from error


def load_tasks(
    manager: Any,
    wanted: list[tuple[str, int]],
    task_data: Path | None,
    questions: Path | None,
    folder: Path,
) -> list[ReadyTask]:
    """Load all tasks once: data that are missing are found before hours of scoring, not after.

    Args:
        folder: takes the descriptions of tasks on local files, which must outlive the scoring.

    Raises:
        ValueError: names the task that cannot be loaded, or two that share one.
    """
    ready, owners = [], {}
    for task, shots in wanted:
        files = local_files(task, shots, task_data, questions)
        with _told(task):
            spec = task
            if files:
                spec = _local_task(manager.task_index[task].yaml_path, task, files, folder)
            loaded = manager.load([spec])
        for name in [*loaded["tasks"], *loaded["groups"]]:
            owner = owners.setdefault(name, task)
            if owner != task:
                raise ValueError(f"{owner} and {task} both hold {name}; leave one of them")
        ready.append(ReadyTask(task, shots, files, spec))
    return ready


def _score_task(
    model: Any, manager: Any, task: ReadyTask, limit: int | None
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Scores of a task, or of a group and its tasks, by name; and the lines of its items."""
    import lm_eval

    with _told(task.name):
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=[task.spec],
            task_manager=manager,
            num_fewshot=task.shots,
            limit=limit,
            use_cache=None,
            cache_requests=False,
        )
    samples, found = results["samples"], {}
    data = "local" if task.files else "hub"
    for name, scores in {**results["results"], **results.get("groups", {})}.items():
        num_items = len({s["doc_id"] for s in samples[name]}) if name in samples else None
        found[name] = {"shots": task.shots, "num_items": num_items, "data": data} | _scores(scores)
    return found, [line for name, answered in samples.items() for line in _items(name, answered)]


def run_harness(
    export: Path,
    tasks: list[str],
    output: Path,
    items_jsonl: Path,
    batch_size: int,
    questions: Path | None = None,
    task_data: Path | None = None,
    limit: int | None = None,
    device: str = "auto",
) -> None:
    """Score an exported model with lm-eval and write what it found.

    Args:
        export: a Hugging Face GPT-2 folder.
        tasks: names of lm-eval's tasks or groups, `task@examples`.
        output: written, JSON: scores by task, and the sha256 of the weights.
        items_jsonl: written: one line a question.
        questions: HellaSwag-shaped, for `hellaswag` without examples.
        task_data: folder with {task}/{split}.jsonl or .parquet for tasks that are not to be
            fetched.
        limit: questions of each task, for a trial.

    Raises:
        ValueError: lm_eval is not installed, an unknown task, one that comes twice, or one whose
            data are not here.
    """
    wanted = parse_tasks(tasks)
    manager = _task_manager([task for task, _ in wanted])
    config = read_config(export)
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    found: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        ready = load_tasks(manager, wanted, task_data, questions, Path(folder))
        model = HFLM(
            pretrained=str(export),
            dtype="auto",
            softmax_dtype="float32",  # its sums are in the logits' type, and bf16 has 8 bits
            device=str(choose_device(device)),
            batch_size=batch_size,
            max_length=config.sequence_length,  # positions beyond it were never trained
        )
        for task in ready:
            scores, items = _score_task(model, manager, task, limit)
            found |= scores
            lines += items
    described = export / "export.json"
    known = read_json(described) if described.exists() else {}
    identity = {"model": export.resolve().name, "run": known.get("run"), "step": known.get("step")}
    identity |= {"weights_sha256": weights_sha256(export), "lm_eval_version": lm_eval.__version__}
    write_text(items_jsonl, "".join(f"{line}\n" for line in lines))
    scores = {"leaderboard_mean": leaderboard_mean(found), "asked": tasks, "tasks": found}
    write_json(output, {**identity, "dtype": known.get("dtype"), **scores})
