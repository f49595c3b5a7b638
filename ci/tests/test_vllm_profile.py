"""Profile h200 without a GPU: its requests, what it watches, how it runs parts, and a merge that finds what it must."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from aligned_e2e import __main__, h200, vllm_engine, vllm_report
from aligned_e2e.vllm_engine import ENGINES, FIRST, MAX_MODEL_LEN, PromptSpec, Schedule, Watch, make_prompts

CI = pathlib.Path(__file__).parents[1]
STAND_IN = CI / "tests" / "stand_in"


# --- requests ---------------------------------------------------------------------------------------------------------


def test_prompts_cross_the_boundaries_and_share_what_a_cache_can_share():
    prompts = make_prompts(8192, count=48, max_tokens=52)
    assert prompts == make_prompts(8192, count=48, max_tokens=52)
    lengths = [len(prompt.tokens) for prompt in prompts]
    assert max(lengths) + 52 < MAX_MODEL_LEN
    assert sum(length > 2048 for length in lengths) >= 10  # past 4 * index_topk
    assert {1, 127, 128, 129, 2047, 2048, 2049} <= set(lengths)
    assert sum(p.tokens[:512] == prompts[5].tokens[:512] for p in prompts) == 12
    halves = [(p.tokens[: len(p.tokens) // 2], p.tokens[(len(p.tokens) + 1) // 2 :]) for p in prompts]
    assert sum(len(left) >= 1300 and left == right for left, right in halves) == 6
    assert all(2 <= token < 8192 for prompt in prompts for token in prompt.tokens)


def test_engines_with_fewer_requests_have_the_first_ones_of_the_others():
    whole = {p.name: p for p in vllm_engine.prompts_of(ENGINES[FIRST], 8192)}
    for engine in ENGINES.values():
        for prompt in vllm_engine.prompts_of(engine, 8192):
            assert prompt.tokens == whole[prompt.name].tokens[: engine.longest]
            assert prompt.seed == whole[prompt.name].seed
            assert prompt.max_tokens <= whole[prompt.name].max_tokens


def test_the_schedules_suffice():
    drawn = [s.name for e in ENGINES.values() for s in e.schedules if e.hooks == "ours" and not s.recompute]
    assert len(drawn) == len(set(drawn)) >= 8
    rollouts = [e for n, e in ENGINES.items() if e.hooks == "ours" and e.ranks == 1 and not n.startswith("reload")]
    tokens = sum(
        e.requests * e.max_tokens for e in rollouts for s in e.schedules if not s.recompute and s.weights == "a"
    )
    assert tokens >= vllm_report.TOKENS_REQUIRED


# --- one engine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.syspath_prepend(str(STAND_IN))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


PROMPTS = [PromptSpec(f"r{i}", tuple(range(1, length + 1)), 4, seed=i) for i, length in enumerate((1, 3, 9, 14))]


def served(schedule, budget=100, drawn=None, **where):
    """What one schedule writes, and the watch."""
    llm = vllm_engine.start(pathlib.Path("a"), {"max_num_batched_tokens": budget})
    watch = Watch(llm)
    return vllm_engine.serve(llm, watch, schedule, PROMPTS, drawn or {}, index_topk=2, **where)


def test_watched_digests_are_those_of_the_logits_that_tokens_were_drawn_from(stand_in):
    import vllm

    whole = served(Schedule("together"))
    for prompt in PROMPTS:
        row = whole["requests"][prompt.name]
        tokens = list(prompt.tokens)
        for token, digest in zip(row["tokens"], row["digests"], strict=True):
            logits = vllm._logits(tokens, 0)
            assert vllm_engine.digests_of_rows(logits[None]) == [digest]
            assert int(logits.argmax()) == token
            tokens.append(token)
    assert whole["did"]["tokens_past_top_k"] == 4 + 4 + 0 + 0  # 9 and 14 tokens are past 8, 3 and 1 end before


@pytest.mark.parametrize(
    ("schedule", "budget", "counter"),
    [
        (Schedule("shuffled", order_seed=1), 100, "steps"),
        (Schedule("alone", at_once=1), 100, "graph_full"),
        (Schedule("chunks"), 5, "prefill_splits"),
        (Schedule("preempted", preempt_every=4), 30, "preemptions"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_schedule_draws_the_same_and_counts_what_it_did(stand_in, schedule, budget, counter):
    want, got = served(Schedule("together")), served(schedule, budget)
    assert got["did"][counter] > 0
    assert got["contradictions"] == []
    assert vllm_report.compare_rows(got["requests"], want["requests"])["tokens_different"] == 0


@pytest.mark.parametrize("budget", [100, 4])
def test_prompt_logprobs_recompute_tokens_logprobs_and_digests(stand_in, budget):
    want = served(Schedule("together"))["requests"]
    drawn = {name: row["tokens"] for name, row in want.items()}
    got = served(Schedule("actor", recompute="first"), budget, drawn)["requests"]
    assert vllm_report.compare_rows(got, want) == {
        "tokens_compared": 16,
        "tokens_different": 0,
        "first_difference": None,
    }


def test_a_batch_dependent_model_is_found(stand_in, monkeypatch):
    """The twin."""
    monkeypatch.setenv("STAND_IN_BATCH_DEPENDENT", "1")
    want = served(Schedule("together"))
    assert vllm_report.compare_rows(served(Schedule("alone", at_once=1))["requests"], want["requests"])[
        "tokens_different"
    ]


def test_a_row_that_comes_twice_must_have_the_same_bits(stand_in):
    watch = Watch(vllm_engine.start(pathlib.Path("a"), {}))
    watch._keep("3-abc", 9, 1)
    watch._keep("3-abc", 9, 1)
    assert watch.contradictions == []
    watch._keep("3-abc", 9, 2)
    assert watch.contradictions == ["request 3, after 9 tokens"]


def test_requests_are_dealt_out_to_ranks_or_one_has_none(stand_in):
    want = served(Schedule("together"))["requests"]
    halves = [served(Schedule("split"), rank=rank, ranks=2)["requests"] for rank in range(2)]
    assert [list(half) for half in halves] == [["r0", "r2"], ["r1", "r3"]]
    assert halves[0] | halves[1] == want
    assert served(Schedule("idle", idle=True), rank=0, ranks=2)["requests"] == want
    assert served(Schedule("idle", idle=True), rank=1, ranks=2)["requests"] == {}


def test_every_record_begins_with_what_ran():
    told = vllm_engine.header("a part", time.monotonic() - 1.5, attestation={"digest": "d"})
    assert (told["part"], told["attestation"]) == ("a part", {"digest": "d"})
    assert 1.4 < told["seconds"] < 10
    assert {"command", "date", "gpu", "gpus"} < told.keys()
    assert {"python", "cuda", "torch"} <= told["versions"].keys()
    assert vllm_engine.header("absent", time.monotonic(), hooks="absent")["attestation"] is None
    assert vllm_engine.header("inert", time.monotonic(), hooks="inert")["attestation"]["hooks"] == {}


# --- environment ------------------------------------------------------------------------------------------------------


def test_environment_of_each_kind(monkeypatch):
    for name in ("VLLM_PLUGINS", "BI_PARTIAL", "BI_EP_TRANSPORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(CI), str(CI.parent / "packages" / "bi-kernels" / "src")]))
    ours = h200.environment_of("ours", {"BI_EP_TRANSPORT": "nccl"})
    assert not {"VLLM_PLUGINS", "BI_PARTIAL"} & ours.keys()
    assert (ours["VLLM_BATCH_INVARIANT"], ours["BI_EP_TRANSPORT"]) == ("1", "nccl")
    stock = h200.environment_of("none")
    assert (stock["VLLM_PLUGINS"], stock["VLLM_BATCH_INVARIANT"]) == ("none", "1")
    assert "VLLM_BATCH_INVARIANT" not in h200.environment_of("inert")
    assert "bi-kernels" in h200.environment_of("inert")["PYTHONPATH"]
    assert h200.environment_of("absent")["PYTHONPATH"] == str(CI)


# --- running parts ----------------------------------------------------------------------------------------------------


def job(folder, name, *scripts, limit=20.0, **more):
    """A job whose ranks run ``scripts``; ``{}`` stands for the record."""
    records = tuple(vllm_report.record_of(folder, name, rank) for rank in range(len(scripts)))
    commands = tuple((sys.executable, "-c", s.format(str(r))) for s, r in zip(scripts, records, strict=True))
    return h200.Job(name, commands, (dict(os.environ),) * len(scripts), records, limit, **more)


def run_jobs(jobs, *, at_once=4, seconds=60.0):
    said = []
    failed = h200.run_jobs(jobs, at_once=at_once, deadline=time.monotonic() + seconds, say=said.append)
    return failed, "\n".join(said)


WRITE = "import pathlib; pathlib.Path({!r}).write_text('1')"
HANG = "import time; print('here it hangs', flush=True); time.sleep(100)"


def test_jobs_run_side_by_side_and_keep_their_records(tmp_path):
    jobs = [job(tmp_path, f"p{i}", "import time; time.sleep(1); " + WRITE) for i in range(4)]
    started = time.monotonic()
    assert run_jobs(jobs)[0] == []
    assert time.monotonic() - started < 3.5
    again = [job(tmp_path, f"p{i}", "raise SystemExit(3)") for i in range(4)]
    assert run_jobs(again) == ([], "")


def test_what_a_failed_job_recorded_is_kept_until_it_can_run_again(tmp_path):
    record = vllm_report.record_of(tmp_path, "cost")
    assert run_jobs([job(tmp_path, "cost", WRITE + "; raise SystemExit(1)")])[0] == ["cost"]
    assert run_jobs([job(tmp_path, "cost", WRITE)], seconds=0)[0] == ["cost"]  # no time left
    assert record.read_text() == "1"
    again = "import pathlib; pathlib.Path({!r}).write_text('2')"
    assert run_jobs([job(tmp_path, "cost", again)])[0] == []
    assert run_jobs([job(tmp_path, "cost", WRITE)]) == ([], "")
    assert record.read_text() == "2"


def test_a_job_that_hangs_is_ended_with_all_it_started(tmp_path):
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']).wait()"
    started = time.monotonic()
    failed, said = run_jobs([job(tmp_path, "bad", child, limit=1), job(tmp_path, "hangs", HANG, limit=1),
                             job(tmp_path, "fine", WRITE)])  # fmt: skip
    assert failed == ["bad", "hangs"]
    assert time.monotonic() - started < 10
    assert "here it hangs" in said
    assert (tmp_path / "hangs.failed").is_file()


def test_nothing_runs_past_the_deadline(tmp_path):
    failed, said = run_jobs([job(tmp_path, "long", HANG), job(tmp_path, "late", WRITE)], at_once=1, seconds=1)
    assert failed == ["long", "late"]
    assert "late: no time left" in said


def test_a_rank_that_fails_ends_the_other(tmp_path):
    started = time.monotonic()
    failed, said = run_jobs([job(tmp_path, "pair", HANG, "raise RuntimeError('no peer access')")])
    assert failed == ["pair"]
    assert "no peer access" in said
    assert time.monotonic() - started < 10


def test_an_old_half_of_a_pair_is_not_kept(tmp_path):
    vllm_report.record_of(tmp_path, "pair").write_text("old")
    assert run_jobs([job(tmp_path, "pair", WRITE, WRITE)])[0] == []
    assert vllm_report.record_of(tmp_path, "pair").read_text() == "1"


def test_who_waits_for_what_a_failed_job_leaves_is_told(tmp_path):
    left = tmp_path / vllm_report.DRAWN
    waits = f"import pathlib, aligned_e2e.vllm_engine as e; e._wait_for(pathlib.Path({str(left)!r})); "
    leaves = f"import pathlib; pathlib.Path({str(left)!r}).write_text('1'); "
    broken = job(tmp_path, "graphs", "raise SystemExit(1)", leaves=(left,))
    failed, said = run_jobs([job(tmp_path, "actor", waits), broken])
    assert failed == ["actor", "graphs"]
    assert "expected the tokens of engine graphs, which has failed" in said
    whole = job(tmp_path, "graphs", leaves + WRITE, leaves=(left,))
    assert run_jobs([job(tmp_path, "actor", waits + WRITE), whole])[0] == []


def started_by(monkeypatch, tmp_path, *arguments):
    """What ``--profile h200`` would run: names by group with how many at a time, and the checkpoints it makes."""
    groups, made = [], []

    def run_jobs(jobs, *, at_once, deadline, say):
        groups.append(([job.name for job in jobs], at_once))
        for job in jobs:
            if "--jobs" in job.commands[0]:
                groups.append(("its own", int(job.commands[0][job.commands[0].index("--jobs") + 1])))
        return []

    monkeypatch.setattr(h200, "gpu_count", lambda: 1)
    monkeypatch.setattr(h200, "run_jobs", run_jobs)
    monkeypatch.setattr(h200, "_make_checkpoints", lambda weights, names, say: made.extend(sorted(names)))
    arguments = ["--work", str(tmp_path), "--output", str(tmp_path / "report.json"), *arguments]
    assert __main__.main(["--profile", "h200", *arguments]) == 1  # nothing was run
    return groups, made


def test_engines_share_the_machine_with_those_that_a_part_starts_itself(tmp_path, monkeypatch, capsys):
    groups, made = started_by(monkeypatch, tmp_path, "--jobs", "12")
    single = [name for name, engine in ENGINES.items() if engine.ranks == 1]
    assert groups == [(["sabotage", "actor b", *single], 8), ("its own", 5), (["cost"], 12)]
    assert made == sorted(h200.CHECKPOINTS)
    assert started_by(monkeypatch, tmp_path, "--only", "cost") == ([([], 6), (["cost"], 6)], [])
    assert started_by(monkeypatch, tmp_path, "--only", "sabotage")[0] == [(["sabotage"], 6), ("its own", 6)]
    assert started_by(monkeypatch, tmp_path, "--quick") == ([(["quick"], 6)], ["a"])
    weights = {schedule.weights for engine in ENGINES.values() for schedule in engine.schedules}
    assert weights == set(h200.CHECKPOINTS)


def test_pairs_need_two_gpus_and_get_one_port(tmp_path):
    jobs = {j.name: j for j in h200.jobs_of(ENGINES, tmp_path, tmp_path, limit=1, gpus=1)}
    assert [n for n in ENGINES if n not in jobs] == [n for n, e in ENGINES.items() if e.ranks == 2]
    assert "CUDA_VISIBLE_DEVICES" not in jobs[FIRST].environments[0] or "CUDA_VISIBLE_DEVICES" in os.environ
    jobs = {j.name: j for j in h200.jobs_of(ENGINES, tmp_path, tmp_path, limit=1, gpus=2)}
    assert {j.environments[0]["CUDA_VISIBLE_DEVICES"] for j in jobs.values() if len(j.commands) == 1} == {"0", "1"}
    pair = jobs["two GPUs, NCCL"]
    assert [e["VLLM_DP_RANK"] for e in pair.environments] == ["0", "1"]
    assert len({(e["VLLM_DP_MASTER_PORT"], e["VLLM_DP_SIZE"], e["BI_EP_TRANSPORT"]) for e in pair.environments}) == 1
    assert len(set(pair.records)) == 2


# --- the commands -----------------------------------------------------------------------------------------------------


def test_profiles_that_cannot_run_here_say_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(h200, "gpu_count", lambda: 0)
    assert __main__.main(["--profile", "h200", "--work", str(tmp_path)]) == 2
    assert "found no GPU" in capsys.readouterr().out
    assert __main__.main(["--profile", "gb200"]) == 2
    assert "not run" in capsys.readouterr().out
    monkeypatch.setattr(h200, "gpu_count", lambda: 1)
    assert __main__.main(["--profile", "h200", "--work", str(tmp_path), "--skip", "nonsense"]) == 2
    assert "parts: expected some of graphs" in capsys.readouterr().out


@pytest.fixture
def host(tmp_path):
    """A machine with one GPU and vLLM, as far as the script can tell; checkpoints are there already."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'GPU 0: stand-in'\n")
    tool.chmod(0o755)
    for name in ("a", "b"):
        folder = tmp_path / "work" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors.index.json").write_text("{}")
        (folder / "config.json").write_text('{"vocab_size": 64, "index_topk": 512}')
    return os.environ | {
        "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(STAND_IN), *sys.path]),
        "PYTHON": sys.executable,
        "OUT": str(tmp_path / "out"),
        "WORK": str(tmp_path / "work"),
        "LIMIT": "120",
    }


def run_script(environment, *arguments):
    command = ["bash", str(CI / "gpu" / "run_aligned_e2e.sh"), "--", *(arguments or ("--only", "off"))]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_script_runs_a_part_packs_its_record_and_goes_on_from_there(host, tmp_path):
    done = run_script(host)
    assert "off: done after" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1  # everything else was not run
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [part["part"] for part in report["parts"]] == ["off"]
    assert "graphs: not run" in report["failures"]
    packed = tmp_path / "out" / "records.tar.gz"
    names = subprocess.run(["tar", "tzf", str(packed)], capture_output=True, text=True, check=True).stdout.split()
    assert {"parts/off.json", "parts/off.log"} <= set(names)

    kept = tmp_path / "kept.tar.gz"
    packed.rename(kept)
    (tmp_path / "work" / "parts" / "off.json").unlink()
    again = run_script(host | {"RECORDS": str(kept), "STAND_IN_CRASH": "must not be started again"})
    assert "off: " not in again.stdout.partition("aligned_e2e")[0]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["parts"] == report["parts"]


def test_the_quick_test_says_by_its_exit_code_whether_rows_are_equal(host, tmp_path):
    """One engine, one checkpoint, a report with its page, and never an answer from an older run."""
    for folder in (tmp_path / "work").iterdir():
        if folder.name != "a":
            shutil.rmtree(folder)
    environment = host | {"STAND_IN_HOOKS": "1", "LIMIT": "180"}
    done = run_script(environment, "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out"
    report = json.loads((out / "report.json").read_text())
    assert (report["quick"], report["tokens_compared"], report["failures"]) == (True, 12 * 16, [])
    assert "192 generated tokens compared, 0 different" in done.stdout
    assert "0 of 192 compared tokens different" in (out / "report.html").read_text()
    assert {"gpu", "versions", "attestations", "parts"} <= report.keys()
    assert __main__.main(["--check", str(out / "report.json")]) == 0

    again = run_script(environment | {"STAND_IN_BATCH_DEPENDENT": "1"}, "--quick")  # the twin
    assert again.returncode == 1
    report = json.loads((out / "report.json").read_text())
    assert report["tokens_different"] > 0
    assert report["failures"][0].startswith("quick, recomputed: ")
    assert __main__.main(["--check", str(out / "report.json")]) == 1

    stock = run_script(host, "--quick")  # without hooks equal rows are no proof
    assert stock.returncode == 1
    assert "the hooks of bi-kernels are not active in this process" in stock.stdout
    assert json.loads((out / "report.json").read_text())["failures"] == ["quick: not run"]


def test_the_script_shows_why_an_engine_failed(host, tmp_path):
    done = run_script(host | {"STAND_IN_CRASH": "out of patience"})
    assert done.returncode == 1
    assert "RuntimeError: out of patience" in done.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {"what": "off", "why": "failed, see off.log"} in report["not_run"]
    assert (tmp_path / "out" / "records.tar.gz").is_file()
