"""What each command would do, and does with stand-ins for the steps: jobs, refusals, leftovers."""

import itertools
import json
import re
import shutil
import time

import pytest

TINY = {"prepare_dataset": 1, "write_settings": 1, "train": 1}
SCORES = {"export": 1, "score": 1}
PAGES = {"write_samples": 1, "render_settings": 1, "render_scores": 1, "render_samples": 1}
HUB = {"fetch_questions": 1, "list_shards": 1, "write_settings": 1, "train": 1}


@pytest.mark.parametrize(
    ("target", "jobs"),
    [
        ("train_tiny", TINY),
        ("export_tiny", TINY | {"export": 1}),
        ("llmc_tiny", TINY | {"write_llmc": 1}),
        ("evaluate_tiny", TINY | SCORES),
        ("samples_tiny", TINY | {"export": 1, "write_samples": 1}),
        ("data_builtin", {"prepare_dataset": 1}),
        ("verify_builtin", {"prepare_dataset": 1}),
        ("bench", {"prepare_dataset": 1, "measure_row": 13, "collect_bench": 1}),
        ("profile", {"prepare_dataset": 1, "measure_row": 3, "write_profile": 1}),
        ("ladder", {"prepare_dataset": 1, "measure_rung": 8, "write_ladder": 1}),
        ("plan", {"write_plan": 1}),
        ("compare", {"write_comparison": 1}),
        ("train_124m", HUB | {"fetch_shard": 101}),
        ("evaluate_gpt3-125m", HUB | SCORES | {"fetch_shard": 1002}),
        (
            "evaluate_gpt2-1558m-baseline",
            HUB | SCORES | {"fetch_shard": 2, "fetch_weights": 1},
        ),
        ("data_fineweb-edu-100b-first100", {"fetch_shard": 101, "list_shards": 1}),
    ],
)
def test_target_takes_these_jobs(project, target, jobs):
    assert project.jobs(target) == jobs | {target: 1}


def test_default_target_takes_every_stage(project):
    # figures and table join once their logs are there: see the test of the finished project
    assert project.jobs() == TINY | SCORES | PAGES | {"all": 1}


def test_nothing_is_uploaded_without_an_owner_and_only_by_its_own_target(project):
    assert "hub.owner is empty" in project.fail("push_tiny")
    project.edit("config/config.yaml", 'owner: ""', "owner: me")
    assert project.jobs("push_tiny") == TINY | SCORES | {"upload_model": 1, "push_tiny": 1}
    assert "upload_model" not in project.jobs()


def test_series_takes_the_four_sizes(project):
    jobs = project.jobs("miniseries")
    for rule in ("train", "export", "score", "render_scores"):
        assert jobs[rule] == 4
    assert jobs["fetch_shard"] == 101 + 1002


def test_dry_run_of_the_largest_model_is_quick_and_writes_nothing(project):
    before = {path for path in project.folder.rglob("*") if ".snakemake" not in path.parts}
    started = time.monotonic()
    project.jobs("train_tiny")
    between = time.monotonic()
    jobs = project.jobs("train_1558m")
    # a thousand more files take about four times as long; their number squared would take hundreds
    assert time.monotonic() - between < 12 * (between - started)
    assert jobs == HUB | {"fetch_shard": 1002, "train_1558m": 1}
    after = {path for path in project.folder.rglob("*") if ".snakemake" not in path.parts}
    assert {path for path in after - before if "__pycache__" not in path.parts} == set()


def test_a_run_that_is_not_measured_by_hellaswag_does_not_fetch_it(project):
    project.edit("config/config.yaml", "  124m:\n", "  124m:\n    hellaswag: false\n")
    jobs = HUB | {"fetch_shard": 101, "train_124m": 1}
    del jobs["fetch_questions"]
    assert project.jobs("train_124m") == jobs


def test_test_series_with_a_kept_step(project):
    jobs = project.jobs("miniseries", "--configfile", "tests/config/series.yaml")
    assert (jobs["train"], jobs["export"], jobs["score"], jobs["find_checkpoint"]) == (4, 5, 5, 1)
    assert "fetch_shard" not in jobs


def test_fp8_is_compared_with_bf16_at_both_ends_of_the_series(project):
    targets = ["train_fp8-124m", "train_fp8-1558m"]
    jobs = project.jobs(*targets, "--configfile", f"{project.root}/benchmarks/fp8.yaml")
    assert (jobs["train"], jobs["write_settings"], jobs["prepare_dataset"]) == (4, 4, 1)


def test_finished_project_has_figures_and_nothing_to_do(finished_project):
    calls = finished_project.calls
    assert {"plot_run", "write_summary", "render_page"} < set(calls)
    assert calls.index("train_run") < calls.index("plot_run")
    assert calls.index("score_model") < calls.index("write_summary")
    for targets in ([], ["plots"], [], ["evaluate_tiny", "samples_tiny"]):
        assert finished_project.jobs(*targets) == {}


def test_real_plots_between_two_runs_change_nothing(finished_project):
    assert "Nothing to be done" in finished_project.succeed("plots")
    assert "Nothing to be done" in finished_project.succeed()


def test_report_is_made_of_a_finished_project(finished_project):
    finished_project.succeed("--report", "results/report.html")
    text = (finished_project.folder / "results/report.html").read_text()
    for name in ("plots/tiny.png", "pages/summary.html", "pages/tiny.scores.html"):
        assert name in text


def test_comments_and_edited_scripts_make_nothing_again(finished_project):
    files = ["Snakefile", "workflow/rules/train.smk", "workflow/scripts/train_run.py"]
    for file in [*files, "workflow/scripts/miniseries/training/trainer.py", "config/config.yaml"]:
        with (finished_project.folder / file).open("a") as stream:
            stream.write("# a comment\n")
    assert finished_project.jobs("all", "plots") == {}


def test_touched_data_make_nothing_again(finished_project):
    data = finished_project.folder / "results/data/builtin"
    finished_project.write("results/data/builtin/builtin_train_000001.bin", "x" * 3_000_000)
    for file in data.iterdir():
        file.touch()
    assert finished_project.jobs("all", "plots") == {}


@pytest.mark.parametrize("gone", ["data/builtin/*.jsonl", "data"])
def test_a_finished_run_is_not_trained_again_where_what_it_was_made_of_is_gone(
    finished_project, gone
):
    results = finished_project.folder / "results"
    for path in [results / "evaluate/tiny", results / "export/tiny", *results.glob(gone)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    data = {"prepare_dataset": 1}
    assert finished_project.jobs("train_tiny") == {}
    assert finished_project.jobs("export_tiny") == {"export": 1, "export_tiny": 1}
    assert finished_project.jobs("evaluate_tiny") == data | SCORES | {"evaluate_tiny": 1}
    forced = finished_project.jobs("evaluate_tiny", "--forcerun", "prepare_dataset")
    assert forced == data | SCORES | {"evaluate_tiny": 1}
    finished_project.succeed("evaluate_tiny")
    assert "train" not in finished_project.jobs()
    assert finished_project.calls.count("train_run") == 1


def test_a_finished_run_is_not_trained_again_along_with_the_one_it_started_from(finished_project):
    finished_project.write("mine.yaml", "runs: {ft: {extends: tiny, init_from: tiny}}\n")
    overlay = ["--configfile", "mine.yaml"]
    finished_project.succeed("train_ft", *overlay)
    (finished_project.folder / "results/train/tiny/done.json").unlink()
    jobs = finished_project.jobs("train_tiny", "train_ft", *overlay)
    assert jobs == {"train": 1, "train_tiny": 1}


def test_other_speed_changes_nothing_of_a_finished_run(finished_project):
    finished_project.edit("config/config.yaml", "    micro_batch: 8\n", "    micro_batch: 2\n")
    finished_project.edit("config/config.yaml", "  gpus: auto", "  gpus: 1")
    finished_project.edit("config/config.yaml", "  tiny:\n", "  tiny:\n    hellaswag: false\n")
    assert finished_project.jobs() == {}
    assert finished_project.jobs("train_tiny") == {}


def test_other_speed_reaches_a_run_that_goes_on(project):
    project.write("fail_training", "")
    project.run("train_tiny")
    project.edit("config/config.yaml", "    micro_batch: 8\n", "    micro_batch: 2\n")
    (project.folder / "fail_training").unlink()
    assert project.jobs("train_tiny") == {"write_settings": 1, "train": 1, "train_tiny": 1}
    project.succeed("train_tiny")
    settings = project.folder / "results/settings/tiny.json"
    assert json.loads(settings.read_text())["machine"]["micro_batch"] == 2


def test_a_finished_run_that_started_from_a_file_may_move_with_its_project(project, tmp_path):
    config = {"runs": {"ft": {"extends": "tiny", "init_from": "./gpt2"}}}
    overlay = ["--configfile", str(project.write("ft.json", config).relative_to(project.folder))]
    start = {"path": str(project.write("gpt2/config.json", "{}"))}
    project.succeed("train_ft", *overlay)
    settings = json.loads((project.folder / "results/settings/ft.json").read_text())
    project.write("results/train/ft/settings.json", settings | {"start": start})
    project.folder = project.folder.rename(tmp_path.with_name("moved"))
    assert project.jobs("train_ft", *overlay) == {}


def test_other_look_only_draws_again(finished_project):
    finished_project.edit("config/config.yaml", "  dpi: 150", "  dpi: 80")
    assert finished_project.jobs() == {"plot_run": 1, "plot_series": 1, "all": 1}
    assert finished_project.jobs("plots") == {"plot_run": 1, "plot_series": 1, "plots": 1}


def test_other_recipe_is_refused_and_the_finished_run_stays(finished_project):
    done = finished_project.folder / "results/train/tiny/done.json"
    before = done.stat().st_mtime_ns
    finished_project.edit("config/config.yaml", "learning_rate: 1.0e-3", "learning_rate: 2.0e-3")
    scores = "results/evaluate/tiny/val_loss.json"
    for targets in (["-n"], ["train_tiny"], ["-n", "evaluate_tiny"], ["-n", scores]):
        result = finished_project.run(*targets)
        assert result.returncode != 0
        assert "run 'tiny' was started with other settings" in result.stdout
        assert "learning_rate: 0.001 -> 0.002" in result.stdout
        assert "`extends: tiny`" in result.stdout
        assert "Traceback" not in result.stdout
    assert done.stat().st_mtime_ns == before
    assert finished_project.jobs("plots") == {}, "figures of what there is are always drawn"
    assert "train" in finished_project.jobs("train_124m"), "other runs are not held up"


def test_new_run_beside_a_refused_one_is_trained(finished_project):
    finished_project.write("mine.yaml", "runs: {tiny-2: {extends: tiny, learning_rate: 2.0e-3}}\n")
    jobs = finished_project.jobs("train_tiny-2", "--configfile", "mine.yaml")
    assert jobs == {"write_settings": 1, "train": 1, "train_tiny-2": 1}


def test_other_data_are_refused(finished_project):
    finished_project.write("results/data/builtin/manifest.json", {"fingerprint": "other"})
    assert "run 'tiny' was started on other tokens" in finished_project.fail("train_tiny")


@pytest.mark.parametrize(
    "entry",
    [
        {"source": "files", "paths": ["{}/*.txt"]},
        {"source": "shards", "train_paths": ["{}/a.txt"], "val_paths": ["texts/b.txt"]},
    ],
)
def test_paths_that_lead_nowhere_leave_a_dataset_as_it_is(project, entry):
    def configure(folder):
        text = json.dumps({"datasets": {"mine": entry}}).replace("{}", folder)
        project.write("mine.yaml", text)

    for name in ("a", "b"):
        project.write(f"texts/{name}.txt", "a text")
    configure("texts")
    options = ["data_mine", "--configfile", "mine.yaml"]
    project.succeed(*options)
    made = project.folder / "results/data/mine"
    known = json.loads((made / "entry.json").read_text())
    configure("txets")
    for more in ([], ["-n"]):
        result = project.run(*options, *more)
        assert result.returncode != 0 and "Traceback" not in result.stdout
        assert "error: dataset mine: no file matches 'txets/" in result.stdout
        assert (made / "manifest.json").exists()
    configure("texts")
    assert project.jobs(*options) == {}
    project.write("texts/a.txt", "a longer text")
    assert "warning: dataset mine: its files have changed" in project.succeed(*options)
    assert known == json.loads((made / "entry.json").read_text())


def test_unknown_task_of_lm_eval_leaves_the_scores_as_they_are(finished_project):
    scores = finished_project.write(
        "results/evaluate/tiny/harness.json", {"tasks": {"hellaswag": 0}}
    )
    finished_project.write("results/evaluate/tiny/harness_items.jsonl", "")
    finished_project.edit("config/config.yaml", "    tasks: [hellaswag]", "    tasks: [helaswag]")
    result = finished_project.run("harness_tiny")
    assert result.returncode != 0 and "Traceback" not in result.stdout
    assert "lm-eval has no task helaswag" in result.stdout or "not installed" in result.stdout
    assert scores.exists()


def test_run_in_progress_is_refused_other_settings_too(finished_project):
    (finished_project.folder / "results/train/tiny/done.json").unlink()
    finished_project.edit("config/config.yaml", "    max_steps: 200", "    max_steps: 300")
    assert "max_steps: 200 -> 300" in finished_project.fail("train_tiny")


def test_rescored_model_draws_the_table_again_once(finished_project):
    finished_project.write("results/export/tiny/model.safetensors", "other weights")
    jobs = finished_project.jobs("evaluate_tiny")
    assert jobs == {"score": 1, "evaluate_tiny": 1}
    finished_project.succeed()
    assert finished_project.calls.count("score_model") == 2
    assert finished_project.calls.count("write_summary") == 2
    assert finished_project.jobs() == {}


def test_failed_training_keeps_its_log_and_is_drawn_and_goes_on(project):
    project.write("fail_training", "")
    result = project.run("train_tiny")
    assert result.returncode != 0
    assert "error: told to fail" in result.stdout
    words = result.stdout.partition("Error in rule train:")[2]
    assert "run tiny: stopped at step 7; the same command goes on" in words
    assert (project.folder / "results/train/tiny/metrics.jsonl").exists()
    assert project.calls.count("train_run") == 1, "the launcher knows better when to start again"
    figures = {"plot_run": 1, "plot_series": 1, "write_summary": 1, "render_summary": 1}
    assert project.jobs("plots") == figures | {"plots": 1}
    project.succeed("plots")
    assert project.jobs("plots") == {}
    project.write("results/train/tiny/metrics.jsonl", "more steps")
    assert project.jobs("plots") == figures | {"plots": 1}
    (project.folder / "fail_training").unlink()
    project.succeed("train_tiny")
    assert project.jobs("train_tiny") == {}


def test_plots_without_any_log_say_so(project):
    text = project.succeed("plots")
    assert "plots: nothing to draw, no run has a log" in text


class TestStepOfARun:
    """results/export/{run}@{step}: never trains a run for a step that is there or will not be."""

    export = "results/export/tiny@200/model.safetensors"
    other = "results/export/tiny@50/model.safetensors"

    def test_step_of_a_run_in_progress_schedules_no_training(self, finished_project):
        (finished_project.folder / "results/train/tiny/done.json").unlink()
        assert finished_project.jobs(self.export) == {"export": 1}
        (finished_project.folder / "results/data/builtin/manifest.json").touch()
        assert finished_project.jobs(self.export) == {"export": 1}
        finished_project.succeed(self.export)
        assert finished_project.calls.count("train_run") == 1
        assert (finished_project.folder / "results/train/tiny/saved/200.json").exists()

    def test_step_that_no_run_in_progress_keeps_is_refused(self, finished_project):
        (finished_project.folder / "results/train/tiny/done.json").unlink()
        text = finished_project.fail(self.other)
        assert (
            "run 'tiny' keeps no checkpoint of step 50: add it to the run's `export_steps:`" in text
        )

    def test_step_that_a_run_in_progress_has_passed_is_refused(self, finished_project):
        folder = finished_project.folder / "results/train/tiny"
        (folder / "done.json").unlink()
        (folder / "saved/200.json").rename(folder / "saved/60.json")
        finished_project.edit("config/config.yaml", "keep_checkpoints: 2", "export_steps: [50, 80]")
        later = "results/export/tiny@80/model.safetensors"
        assert finished_project.jobs(later)["train"] == 1
        branch = "  x: {extends: tiny, branch_from: tiny@50}\n  350m:\n"
        finished_project.edit("config/config.yaml", "  350m:\n", branch)
        for target in (self.other, "evaluate_tiny", "train_x"):
            text = finished_project.fail(target)
            assert "run 'tiny' is at step 60 and has kept no checkpoint of step 50" in text
        (folder / "checkpoints/step-00000050").mkdir()
        assert finished_project.jobs(self.other)["train"] == 1, "which writes its marker again"
        (folder / "saved/60.json").write_text("{}")
        text = finished_project.fail(self.other)
        assert "60.json: damaged, it lacks checkpoint" in text and "Traceback" not in text

    def test_missing_step_of_a_finished_run_names_those_there_are(self, finished_project):
        result = finished_project.run(self.other)
        assert result.returncode != 0
        assert "keeps no checkpoint of step 50; it keeps: 200" in result.stdout
        assert (finished_project.folder / "results/train/tiny/done.json").exists()

    def test_export_outlives_its_checkpoint(self, finished_project):
        finished_project.succeed(self.export)
        (finished_project.folder / "results/train/tiny/saved/200.json").unlink()
        assert finished_project.jobs(self.export) == {}

    def test_kept_step_is_exported_after_training(self, project):
        project.edit("config/config.yaml", "keep_checkpoints: 2", "export_steps: [50]")
        jobs = TINY | {"find_checkpoint": 1, "export": 2, "score": 2}
        assert project.jobs("evaluate_tiny") == jobs | {"evaluate_tiny": 1}
        project.succeed("evaluate_tiny")
        assert (project.folder / "results/evaluate/tiny@50/val_loss.json").exists()
        assert project.jobs("evaluate_tiny") == {}


def test_a_verdict_on_a_step_is_of_the_run_that_there_is(finished_project):
    verdict = "results/replay/tiny@199.json"
    assert "run 'tiny' has the steps 0 to 199, not 200" in finished_project.fail(
        "results/replay/tiny@200.json"
    )
    finished_project.succeed(verdict)
    assert finished_project.jobs(verdict) == {}
    frozen = finished_project.folder / "results/train/tiny/settings.json"
    settings = json.loads(frozen.read_text())
    frozen.write_text(json.dumps(settings | {"fingerprint": "of another seed"}))
    assert finished_project.jobs(verdict) == {"replay": 1}
    frozen.unlink()
    result = finished_project.run(verdict)
    assert "no step of run 'tiny' can be done twice before it was trained" in result.stdout
    assert (finished_project.folder / verdict).exists() and "Traceback" not in result.stdout


def test_sweep_trains_every_value_and_draws_them_together(project):
    arguments = ["train_rates", "--configfile", "tests/config/sweep.yaml"]
    project.succeed(*arguments)
    assert project.calls.count("train_run") == 2
    assert project.calls.count("plot_series") == 1
    assert (project.folder / "results/plots/rates.png").exists()
    assert project.jobs(*arguments) == {}


def test_more_shards_fetch_only_the_new_ones(project):
    folder = project.folder / "results/data/fineweb-edu-100b-first100"
    target = "data_fineweb-edu-100b-first100"
    project.edit("config/config.yaml", "num_shards: 100\n", "num_shards: 2\n")
    project.succeed(target)
    assert project.jobs(target) == {}
    for file in folder.iterdir():
        file.touch()
    assert project.jobs(target) == {}
    (folder / "edu_fineweb_train_000001.bin").unlink()
    (folder / "manifest.json").unlink()
    assert project.jobs(target) == {"list_shards": 1, target: 1}, "which fetches what is gone"
    project.edit("config/config.yaml", "num_shards: 2\n", "num_shards: 3\n")
    assert project.jobs(target)["fetch_shard"] == 1


def test_text_of_the_hub_is_listed_then_tokenized_file_by_file_then_packed(project):
    target = "data_fineweb-10b"
    assert project.jobs(target) == {"list_files": 1, "pack_dataset": 1, target: 1}
    project.succeed(target)
    assert project.calls == ["list_files", *["tokenize_file"] * 2, "prepare_dataset"]
    assert project.jobs(target) == {}
    for file in project.folder.glob("results/data/fineweb-10b/**/*.json"):
        file.touch()
    assert project.jobs(target) == {}
    project.edit(
        "config/config.yaml",
        "    files: [sample/10BT/*.parquet]",
        "    num_shards: 5\n    files: [sample/10BT/*.parquet]",
    )
    assert project.jobs(target) == {"pack_dataset": 1, target: 1}
    (project.folder / "results/data/fineweb-10b/manifest.json").unlink()
    (project.folder / "results/data/fineweb-10b/tokenized/000001.json").unlink()
    assert project.jobs(target) == {"tokenize_file": 1, "pack_dataset": 1, target: 1}


def test_own_shards_are_checked_and_scored_on_hellaswag(project):
    config = "datasets: {own: {source: shards, train_paths: [a*], val_paths: [b*]}}\n"
    project.write("mine.yaml", config + "runs: {own: {extends: tiny, dataset: own}}\n")
    jobs = project.jobs("evaluate_own", "--configfile", "mine.yaml")
    expected = {"check_shards": 1, "fetch_questions": 1, "write_settings": 1, "train": 1} | SCORES
    assert jobs == expected | {"evaluate_own": 1}


@pytest.mark.parametrize(
    ("folder", "jobs"),
    [("builtin", {"prepare_dataset": 1}), ("hellaswag", {"fetch_questions": 1})],
)
def test_llm_c_s_file_of_questions_is_made_on_demand(project, folder, jobs):
    target = f"results/data/{folder}/hellaswag_val.bin"
    assert project.jobs(target) == jobs | {"write_eval_file": 1}


@pytest.mark.parametrize(
    ("target", "messages"),
    [
        ("train_tinny", ["did you mean train_tiny?", "Runs: tiny, 124m, 350m, 774m, 1558m"]),
        ("plot", ["did you mean plots?"]),
        ("data_fineweb", ["Datasets: builtin, builtin-large, fineweb-edu-100b"]),
    ],
)
def test_unknown_target_is_told_the_known_ones(project, target, messages):
    text = project.fail(target)
    for message in [f"there is no target '{target}'", *messages]:
        assert message in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_steps: 200", "max_stps: 200", "runs.tiny.max_stps: unknown key; did you mean"),
        ("max_steps: 200", "max_steps: many", "runs.tiny.max_steps: 'many' is not allowed"),
        ("rate: 1.0e-3", "rate: 1e-3", "YAML reads 1e-3 as text: write 1.0e-3"),
        ("dataset: builtin\n", "dataset: built\n", "there is no dataset 'built'; did you mean"),
        ("default_runs: [tiny]", "default_runs: [toy]", "default_runs: there is no run 'toy'"),
        ("H200: null", "H200: -1", "H200: -1 is not allowed; needed is a number or null"),
        ("\nplan:\n", "\nplans:\n", "plans: unknown key"),
    ],
)
def test_wrong_configuration_is_refused_in_one_message(project, old, new, message):
    project.edit("config/config.yaml", old, new)
    text = project.fail("train_tiny")
    assert message in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("old", "new", "target", "message"),
    [
        ("[1558m, gpt2", "[1559m, gpt2", "side_by_side", "there is no run '1559m'; did you mean"),
        ("rate: 1.0e-3", "rate: [1.0e-3, 2.0e-3]", "bench", "bench.rows.0: 'tiny' is a sweep"),
        ("rate: 1.0e-3", "rate: [1.0e-3, 2.0e-3]", "ladder", "'tiny' is a sweep; write one of"),
        (
            "  350m:\n",
            "  x: {extends: tiny, init_from: ./no}\n  350m:\n",
            "train_x",
            "runs.x.init_from: there is no /",
        ),
        (", profile: true", "", "profile", "no row of `bench: rows:` has `profile: true`"),
    ],
)
def test_what_does_not_fit_a_target_is_refused_by_that_one_alone(
    project, old, new, target, message
):
    project.edit("config/config.yaml", old, new)
    assert message in project.fail(target)
    assert project.jobs("train_124m")["train"] == 1


def test_no_target_of_a_run_has_the_name_of_a_rule(project):
    """`push_model` would be the rule of that name, and the target of a run called `model`."""
    files = [project.root / "Snakefile", *(project.root / "workflow/rules").glob("*.smk")]
    text = "".join(file.read_text() for file in files)
    stages = set(re.findall(r'f"(\w+_)\{name\}"', text)) | {"harness_", "leaderboard_"}
    rules = re.findall(r"^(?:rule|checkpoint|use rule \w+ as) (\w+)", text, re.MULTILINE)
    assert {"train_", "push_", "data_", "verify_"} <= stages and len(rules) > 30
    assert [rule for rule in rules if rule.startswith(tuple(stages))] == []


def test_scripts_understand_what_the_rules_tell_them(project, script_calls):
    for script, options in script_calls:
        source = (project.root / "workflow/scripts" / script).read_text()
        if "add_style_arguments" in source:
            source += (project.root / "workflow/scripts/miniseries/reporting/canvas.py").read_text()
        missing = {option for option in options if f'"{option}"' not in source}
        assert not missing, f"{script} has no {missing}"


def test_slurm_profile_sets_what_the_default_profile_sets(project):
    import yaml

    default, slurm = (
        yaml.safe_load((project.root / f"profiles/{name}/config.yaml").read_text())
        for name in ("default", "slurm")
    )
    for key in default.keys() - {"cores", "resources"}:
        assert slurm[key] == default[key], key
    rules = "".join(path.read_text() for path in (project.root / "workflow/rules").glob("*.smk"))
    heads = r"^(?:rule|checkpoint|use rule (?P<base>\w+) as) (?P<name>\w+)(?::| with:)$"
    names = {head["name"] for head in re.finditer(heads, rules, re.MULTILINE)}
    assert slurm["set-threads"].keys() <= names
    on_gpu = set()
    for head, following in itertools.pairwise([*re.finditer(heads, rules, re.MULTILINE), None]):
        body = rules[head.end() : following.start() if following else None]
        if "gpu_slot" in body or head["base"] in on_gpu:
            on_gpu.add(head["name"])
    assert {name for name, found in slurm["set-resources"].items() if "gres" in found} == on_gpu
    assert on_gpu <= slurm["set-threads"].keys()
