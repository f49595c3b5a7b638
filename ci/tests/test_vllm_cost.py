"""Cost of aligned mode without a GPU: what a trace says, turns and baselines, and processes that fail."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import threading
import time
import types
from multiprocessing import Pipe

import pytest
import torch

from aligned_e2e import vllm_cost, vllm_cost_engine
from aligned_e2e.kernel_times import (
    FLASH_RATIOS,
    WAITING,
    Kernel,
    OpTime,
    Profile,
    busy_us,
    compare_layers,
    compare_ops,
    compare_parts,
    host_times,
    host_us,
    kernels,
    label,
    launches,
    layer_times,
    op_times,
    overhead_percent,
    relabel,
)
from aligned_e2e.report_view import with_baselines
from aligned_e2e.shared_layers import SharingError
from aligned_e2e.vllm_cost import WORKLOADS, Child, Clock, Side, SideError, cost_row, measure_all, share_of


def event(category, name, ts, dur, correlation=None):
    arguments = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": arguments}


def kernel(name, launch, start, us, correlation):
    return [event("cuda_driver", "launch", launch, 1, correlation), event("kernel", name, start, us, correlation)]


class TestTrace:
    """``kernels``, ``relabel`` and ``op_times``."""

    def test_a_kernel_belongs_to_the_innermost_range_of_its_launch(self):
        events = [
            event("user_annotation", label("mHC", 0), 0, 100),
            event("user_annotation", label("experts", 0), 20, 40),
            event("user_annotation", label("router", 0), 25, 10),
            event("user_annotation", label("lm_head"), 200, 50),
            event("user_annotation", "somebody else's", 0, 1000),
            *kernel("pre", 5, 300, 10, 1),
            *kernel("gate", 30, 310, 20, 2),
            *kernel("gemm", 50, 330, 30, 3),
            *kernel("post", 70, 360, 40, 4),
            *kernel("head", 210, 400, 50, 5),
            *kernel("copy", 260, 450, 60, 6),
        ]
        found = {(time.layer, time.op, time.kernel): (time.us, time.calls) for time in op_times(kernels(events), 1)}
        assert found == {
            (0, "mHC", "pre"): (10, 1),
            (0, "router", "gate"): (20, 1),
            (0, "experts", "gemm"): (30, 1),
            (0, "mHC", "post"): (40, 1),
            (None, "lm_head", "head"): (50, 1),
            (None, "other", "copy"): (60, 1),
        }

    def test_times_are_per_step(self):
        events = [part for step in range(4) for part in kernel("k", 10 * step, 10 * step, 6, step)]
        assert op_times(kernels(events), 4) == [OpTime(None, "other", "k", us=6, calls=1)]

    def test_an_instant_counts_once_for_the_kernel_that_began_first(self):
        # The second waits inside its own duration, the third runs beside both on another stream.
        events = [*kernel("a", 0, 100, 50, 1), *kernel("b", 1, 110, 60, 2), *kernel("c", 2, 120, 10, 3)]
        found = {time.kernel: time.us for time in op_times(kernels(events), 1)}
        assert found == {"a": 50, "b": 20, "c": 0}

    def test_copies_count_and_host_time_does_not(self):
        events = [event("gpu_memcpy", "copy", 0, 7, 1), event("cpu_op", "aten::mm", 0, 100), {"ph": "M", "name": "x"}]
        assert [(time.op, time.us) for time in op_times(kernels(events), 1)] == [("other", 7)]

    def test_kernels_of_a_graph_get_the_ranges_of_the_same_kernels(self):
        def step(at, **ops):
            return [Kernel(at + i, at + i + 1, name, *where) for i, (name, where) in enumerate(ops.items())]

        gate, gemm, other = (0, "router"), (1, "experts"), (None, "other")
        eager = [*step(0, a=gate, b=gemm), *step(5, a=gemm), *step(10, a=gate, b=gemm), *step(15, a=gemm)]
        graph = [*step(0, b=other, a=other), *step(3, a=other, c=other)]
        found = [(kernel.name, kernel.layer, kernel.op) for kernel in relabel(graph, eager, 1, 2)]
        assert found == [("b", *gemm), ("a", *gate), ("a", *gemm), ("c", *other)]
        # What the replayed step names itself keeps its name, and the others are counted without it: the same kernel is
        # the router's in a layer and the lm_head's after the last.
        head = (None, "lm_head")
        eager = [*step(0, a=gate, b=gemm), *step(5, a=head)]
        graph = [*step(0, a=other, b=other), *step(3, a=head)]
        found = [(kernel.name, kernel.layer, kernel.op) for kernel in relabel(graph, eager, 1, 1)]
        assert found == [("a", *gate), ("b", *gemm), ("a", *head)]
        eager = [*step(0, a=gate, b=gemm), *step(5, a=gemm), *step(10, a=gate, b=gemm), *step(15, a=gemm)]
        graph = [*step(0, b=other, a=other), *step(3, a=other, c=other)]
        # One more than eager steps have: which one is anybody's guess.
        more = relabel([*graph, *step(9, a=other)], eager, 1, 2)
        assert [(kernel.layer, kernel.op) for kernel in more if kernel.name == "a"] == [other] * 3

    def test_host_time_is_of_the_innermost_range_and_waiting_is_apart(self):
        def in_thread(tid, *made):
            return [one | {"tid": tid} for one in made]

        events = [
            *in_thread(
                1,
                event("user_annotation", label("mHC", 0), 0, 100),
                event("user_annotation", label("experts", 0), 20, 40),
                event("user_annotation", label("router", 0), 25, 10),
                event("user_annotation", label("mHC", 1), 100, 50),
                event("user_annotation", label("lm_head"), 200, 7),
                event("user_annotation", "somebody else's", 0, 1000),
                event("cuda_runtime", "cudaStreamSynchronize", 110, 30, 8),
                event("cuda_runtime", "cudaEventSynchronize", 160, 30, 9),  # between steps
                event("cuda_runtime", "cudaLaunchKernel", 30, 3, 1),
                event("cpu_op", "aten::mm", 30, 5),
            ),
            *in_thread(2, event("cuda_runtime", "cudaDeviceSynchronize", 21, 500, 10)),
        ]
        found = host_times(events, 2)
        assert found == {"mHC": 40, "experts": 15, "router": 5, WAITING: 15, "lm_head": 3.5}
        assert host_us(found) == 60  # of the forward, in which the host does something

    def test_ranges_of_all_layers_are_told_apart(self):
        """43 layers, whose kernels have the same names, replayed and eager."""

        def step(at, layer_of, op_of):
            return [
                part
                for index in range(43)
                for part in (
                    Kernel(at + 10 * index, at + 10 * index + 5, "gemm", layer_of(index), op_of("experts")),
                    Kernel(at + 10 * index + 5, at + 10 * index + 9, "pre", layer_of(index), op_of("mHC")),
                )
            ]

        eager = step(0, lambda index: index, lambda op: op)
        graph = [kernel for at in (0, 1000, 2000) for kernel in step(at, lambda index: None, lambda op: "other")]
        found = op_times(relabel(graph, eager, 3, 1), 3)
        assert {(time.layer, time.op, time.us, time.calls) for time in found} == {
            (index, op, us, 1) for index in range(43) for op, us in (("experts", 5), ("mHC", 4))
        }
        assert layer_times(found, FLASH_RATIOS) == {"window only": 9, "C4": 9, "C128": 9}


RATIOS = (0, 4, 128)


def times(layers, **outside):
    made = [OpTime(index, "experts", "k", us, 1) for index, us in enumerate(layers)]
    return [*made, *(OpTime(None, op, "k", us, 1) for op, us in outside.items())]


class TestTables:
    """What times say."""

    def test_flash_has_two_window_layers_and_then_both_kinds_by_turns(self):
        assert len(FLASH_RATIOS) == 43
        assert [FLASH_RATIOS.count(ratio) for ratio in RATIOS] == [2, 21, 20]
        assert FLASH_RATIOS[:5] == (0, 0, 4, 128, 4)
        assert FLASH_RATIOS[-1] == 4

    def test_the_forward_is_all_but_the_head_sampling_and_other(self):
        step = times((10.0, 100.0, 1000.0), embedding=5.0, lm_head=7.0, other=3.0, log_softmax=1.0, sampling=2.0)
        assert busy_us(step) == 1115
        assert launches(step) == 4

    def test_parts_are_all_layers_together_and_each_op_outside(self):
        rows = compare_parts(times((10.0, 20.0), lm_head=7.0), times((11.0, 21.0), lm_head=6.0, sampling=2.0))
        assert [(row["part"], row["stock_us"], row["aligned_us"]) for row in rows] == [
            ("layers", 30, 32),
            ("lm_head", 7, 6),
            ("sampling", 0, 2),
        ]

    def test_layers_of_a_type_are_averaged(self):
        assert layer_times(times((10.0, 100.0, 200.0)), (0, 4, 4)) == {"window only": 10, "C4": 150}
        rows = compare_layers({"C4": 1.0, "C128": 2.0}, {"C4": 3.0})
        assert rows == [{"layer_type": "C4", "stock_us": 1.0, "aligned_us": 3.0}]

    def test_ops_are_listed_by_excess_with_their_longest_kernels(self):
        stock = [OpTime(0, "a", "x", 5, 1), OpTime(1, "a", "y", 6, 2), OpTime(None, "b", "z", 50, 1)]
        aligned = [OpTime(0, "a", "x", 40, 1), OpTime(None, "b", "z", 20, 1), OpTime(None, "c", "w", 4, 1)]
        rows = compare_ops(Profile(stock, {}, 6), Profile(aligned, {}, 6), longest=1)
        assert [(r["op"], r["stock_us"], r["aligned_us"], r["calls"], r["stock_calls"]) for r in rows] == [
            ("a", 11, 40, 1, 3),
            ("c", 0, 4, 1, 0),
            ("b", 50, 20, 1, 1),
        ]
        assert rows[0]["stock_kernels"] == [["y", 6, 2]]
        assert {(row["stock_host_us"], row["aligned_host_us"]) for row in rows} == {(None, None)}  # replayed

    def test_ops_have_their_host_time_where_no_graph_was_replayed(self):
        step = [OpTime(0, "a", "x", 5, 1)]
        rows = compare_ops(Profile(step, {"a": 7.0, WAITING: 3.0}, 6), Profile(step, {"a": 9.0}, 6))
        assert [(row["op"], row["stock_host_us"], row["aligned_host_us"], row["calls"]) for row in rows] == [
            ("a", 7, 9, 1),
            (WAITING, 3, 0, 0),
        ]

    def test_overhead_is_of_time(self):
        assert overhead_percent(100, 105) == 5
        assert overhead_percent(100, 95) == -5


class Engine:
    """Answers at once, at a speed of its own, and writes down when it was asked."""

    def __init__(self, name, speed, asked, clock, fails=(), us=None, pace=0.1):
        self.name, self.speed, self.asked, self.clock, self.fails = name, speed, asked, clock, fails
        self.us, self.pace = us or 1e6 / speed, pace

    def ask(self, name, timeout, **arguments):
        self.asked.append((self.name, name, arguments))
        self.clock[0] += self.pace
        if name in self.fails:
            raise SideError(f"{self.name} died", alive=name == "profile")
        if name == "measure":
            tokens = 100 * arguments["steps"]
            return {"tokens": tokens, "seconds": tokens / self.speed, "forward_us": self.us, "forwards": 1,
                    "modes": {"FULL": 1}}  # fmt: skip
        if name == "profile":
            host = {} if arguments["kind"] == "decode" else {"experts": self.us, "lm_head": 1.0}
            return Profile(times((self.us / 10,) * 3, lm_head=1.0), host, 6.0)
        return 4000.0


def run(limit=400.0, us=None, pace=0.1, **fails):
    now, asked = [0.0], []
    speeds = {"stock": 100, "stock deep_gemm": 200, "aligned": 160}
    engines = {name: Engine(name, speed, asked, now, fails.get(name.replace(" ", "_"), ()), (us or {}).get(name), pace)
               for name, speed in speeds.items()}  # fmt: skip
    record = {name: [] for name in ("cost", "layers", "profiles", "not_run", "copy_gb_s")}
    record["cost_model"] = {"ratios": RATIOS}
    measure_all(engines, Clock(limit, lambda: now[0]), record, lambda: json.dumps(record))
    return record, asked


class TestTurns:
    """``measure_all``."""

    def test_sides_take_turns_and_the_faster_stock_is_the_baseline(self):
        record, asked = run()
        assert record["not_run"] == []
        assert [(row["workload"], row["batch"]) for row in record["cost"]] == [(w.name, w.batch) for w in WORKLOADS]
        assert {row["stock_baseline"] for row in record["cost"]} == {"stock deep_gemm"}
        assert {(row["stock_tok_s"], row["aligned_tok_s"], row["overhead_percent"]) for row in record["cost"]} == {
            (200, 160, 25)
        }
        turns = [side for side, name, arguments in asked if name == "measure" and "warm" in arguments]
        forwards = ["stock", "stock deep_gemm", "aligned"]
        assert turns == (forwards + forwards[::-1]) * (len(turns) // 6)
        assert len(turns) >= 3 * vllm_cost._FEWEST * len(WORKLOADS)
        for row in record["cost"]:
            assert (row["stock_spread"], row["aligned_spread"]) == ([200] * 3, [160] * 3)
            assert row["overhead_spread"] == [25] * 3
        assert record["waited"] == dict.fromkeys(forwards, 4000.0)
        assert record["copy_gb_s"] == [4000.0, 4000.0]

    def test_gpu_time_has_its_own_baseline(self):
        """The side with most tokens/s may be bound by the host; its GPU time would flatter the hooks."""
        us = {"stock": 4000.0, "stock deep_gemm": 8000.0, "aligned": 5000.0}
        record, _ = run(us=us)
        for row in record["cost"]:
            assert (row["stock_baseline"], row["overhead_percent"]) == ("stock deep_gemm", 25)
            assert (row["forward_baseline"], row["stock_forward_us"], row["aligned_forward_us"]) == (
                "stock",
                4000,
                5000,
            )
            assert row["forward_overhead_percent"] == 25  # and not -37.5
            assert row["forward_us"] == us
        for profile in record["profiles"]:
            assert (profile["forward_baseline"], profile["stock_forward_us"]) == ("stock", 4000)
            assert profile["layers"][0]["stock_us"] == profile["layers_us"]["stock"]["window only"] == 400
            assert profile["layers_us"]["stock deep_gemm"]["window only"] == 800
            assert profile["sides"]["stock"]["busy_us"] == 1200
        assert "cost_note" not in with_baselines(record)
        record, _ = run(us=us, stock=("profile",))  # the other stock side is named instead, and that it is alone
        assert {profile["forward_baseline"] for profile in record["profiles"]} == {"stock deep_gemm"}
        assert "not profiled in this run" in with_baselines(record)["cost_note"]

    def test_profiles_are_of_all_sides(self):
        record, asked = run()
        assert {side for side, name, _ in asked if name == "profile"} == {"stock", "stock deep_gemm", "aligned"}
        assert [(p["workload"], p["batch"]) for p in record["profiles"]] == [
            (w.name, w.batch) for w in WORKLOADS if w.profiled
        ]
        assert record["layers"][0] == {"layer_type": "window only", "stock_us": 500.0, "aligned_us": 625.0}
        assert {row["op"] for row in record["ops"]} == {"experts", "lm_head"}
        for profile in record["profiles"]:
            assert [row["part"] for row in profile["parts"]] == ["layers", "lm_head"]
        wanted = {("mixed: one 2k prompt a step", 32), ("prefill 1k", 1), ("prefill 8k", 1)}
        assert {("decode", batch) for batch in (1, 8, 32, 128)} | wanted == {
            (profile["workload"], profile["batch"]) for profile in record["profiles"]
        }

    def test_where_the_gpu_waits_for_the_host_the_profile_says_so(self):
        record, _ = run(us={"stock": 4000.0, "stock deep_gemm": 8000.0, "aligned": 5000.0})
        for profile in record["profiles"]:
            side = profile["sides"]["aligned"]
            assert (side["forward_us"], side["busy_us"], side["busy_percent"]) == (5000, 1500, 30)
            assert (side["launches"], side["experts"]) == (3, 6)
            eager = profile["workload"] != "decode"
            assert side["host_us"] == (5000 if eager else None)  # without the head's
            row = next(row for row in profile["ops"] if row["op"] == "experts")
            assert (row["stock_host_us"], row["aligned_host_us"]) == ((4000, 5000) if eager else (None, None))

    def test_requests_are_dropped_on_the_way_down(self):
        _, asked = run()
        kept = [arguments["count"] for side, name, arguments in asked if side == "stock" and name in ("fill", "keep")]
        assert kept == [128, 32, 8, 1, 0, 0, 0]

    def test_a_side_that_dies_is_left_out_and_reported(self):
        record, asked = run(stock_deep_gemm=("measure",))
        assert record["not_run"][0]["what"] == "decode, batch 128 on stock deep_gemm"
        assert {row["stock_baseline"] for row in record["cost"]} == {"stock"}
        assert sum(side == "stock deep_gemm" and name == "measure" for side, name, _ in asked) == 1

    def test_without_aligned_there_is_no_overhead(self):
        record, _ = run(aligned=("fill",))
        assert {(row["stock_tok_s"], row["aligned_tok_s"], row["overhead_percent"]) for row in record["cost"]} == {
            (200, None, None)
        }
        assert record["profiles"] == []

    def test_a_profile_that_fails_costs_only_itself(self):
        record, _ = run(aligned=("profile",))
        assert all(row["aligned_tok_s"] for row in record["cost"])
        assert record["profiles"] == []
        assert len(record["not_run"]) == 2 * sum(workload.profiled for workload in WORKLOADS)

    def test_nothing_is_begun_without_time(self):
        record, asked = run(limit=18.0)
        assert 0 < len(record["cost"]) < len(WORKLOADS)
        assert {line["why"] for line in record["not_run"]} >= {"no time left"}
        assert record["cost"][0]["aligned_tok_s"]
        assert len([1 for side, name, _ in asked if side == "aligned" and name == "measure"]) >= 4

    def test_time_is_shared_among_the_workloads_that_are_left(self):
        last = WORKLOADS[-1]
        assert last.profiled
        assert share_of(last, 10.0 + vllm_cost._PROFILE) == 10
        assert share_of(WORKLOADS[0], 200.0) < 200 / len(WORKLOADS)
        assert share_of(WORKLOADS[0], 1.0) == 0
        left, shares = 300.0, []
        for workload in WORKLOADS:
            shares.append(share_of(workload, left))
            left -= shares[-1] + vllm_cost._PROFILE * workload.profiled
        assert left == pytest.approx(0)
        assert shares == pytest.approx([shares[0] * workload.share for workload in WORKLOADS])

    @pytest.mark.parametrize("limit", [260.0, 270.0, 280.0])
    def test_turns_leave_their_time_to_the_profile(self, limit):
        """Two more rounds are begun only if they fit: the last workload's once took the time of its profile."""
        record, asked = run(limit=limit, pace=1.0)
        profiled = [side for side, name, _ in asked if name == "profile"]
        assert len(profiled) == 3 * sum(workload.profiled for workload in WORKLOADS)
        assert {len(row["turns"]["aligned"]) % 2 for row in record["cost"]} == {0}

    def test_medians_ignore_one_slow_turn(self):
        turn = {"tokens": 100, "seconds": 1.0, "forward_us": 5.0, "forwards": 1, "modes": {}}
        turns = {"stock": [turn, turn, turn | {"seconds": 9.0, "forward_us": 99.0}], "aligned": [turn, turn, turn]}
        row = cost_row(WORKLOADS[0], turns)
        assert (row["overhead_percent"], row["forward_overhead_percent"]) == (0, 0)
        assert row["stock_spread"] == [11.11, 100, 100]
        assert row["overhead_percent"] == row["overhead_spread"][1]
        assert row["overhead_spread"] == [-88.89, 0, 0]

    def test_a_drift_that_both_sides_share_is_no_overhead(self):
        """Two medians of drifting series may be of different turns; pairs are not."""

        def turn(rate):
            return {"tokens": rate, "seconds": 1.0, "forward_us": 5.0, "forwards": 1, "modes": {}}

        stock, aligned = (100.0, 200.0, 300.0), (90.0, 400.0, 300.0)
        row = cost_row(WORKLOADS[0], {"stock": [*map(turn, stock)], "aligned": [*map(turn, aligned)]})
        assert (row["stock_tok_s"], row["aligned_tok_s"]) == (200, 300)  # of which one would say -33 %
        assert row["overhead_percent"] == 0


class TestServing:
    """``serve``, and the processes that it runs in."""

    def test_commands_become_calls_and_errors_become_answers(self, capsys):
        class Stand:
            def __init__(self, checkpoint):
                self.checkpoint = checkpoint

            def describe(self):
                return self.checkpoint

            def measure(self, steps):
                return 1 / steps

        ours, theirs = Pipe()
        thread = threading.Thread(target=vllm_cost_engine.serve, args=(theirs, Stand))
        thread.start()
        answers = []
        for command in (("start", {"checkpoint": "c"}), ("measure", {"steps": 2}), ("measure", {"steps": 0})):
            ours.send(command)
            answers.append(ours.recv())
        time.sleep(0.3)
        ours.send(("waited", {}))
        state, waited = ours.recv()
        assert state == "ok"
        assert 0.3 <= waited["seconds"] < 5
        assert waited["core_seconds"] < 0.5 * waited["seconds"]  # who waits does not poll
        ours.send(("stop", {}))
        thread.join(10)
        assert not thread.is_alive()
        assert answers[:2] == [("ok", "c"), ("ok", 0.5)]
        assert answers[2][0] == "error"
        assert "ZeroDivisionError" in answers[2][1]

    def test_a_process_without_vllm_says_so(self, tmp_path):
        child = Child("stock", Side(), tmp_path / "log")
        try:
            with pytest.raises(SideError, match="ModuleNotFoundError"):
                child.receive(60)
            with pytest.raises(SideError, match="ended, exit code 1"):
                child.receive(60)
        finally:
            child.end()

    def test_a_process_that_does_not_answer_is_ended(self, tmp_path, monkeypatch):
        real = vllm_cost.subprocess.Popen
        sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
        monkeypatch.setattr(vllm_cost.subprocess, "Popen", lambda command, **more: real(sleep, **more))
        child = Child("aligned", Side(), tmp_path / "log")
        with pytest.raises(SideError, match="no answer in time"):
            child.receive(0.1)
        assert child.process.poll() is not None

    def test_the_record_is_written_when_no_engine_starts(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(vllm_cost, "_jobs", list)
        monkeypatch.setattr(vllm_cost, "SIDES", {"stock": Side(), "aligned": Side(aligned=True)})
        (tmp_path / "model.safetensors.index.json").write_text("{}")
        code = vllm_cost.main(["--checkpoint", str(tmp_path), "--parts", str(tmp_path / "parts")])
        record = json.loads((tmp_path / "parts" / "cost.json").read_text())
        assert code == 1
        assert record["part"] == "cost"
        assert "nothing to compare" in record["not_run"][-1]["why"]

    def test_a_checkpoint_that_cannot_be_made_ends_the_run(self, tmp_path, monkeypatch):
        def start(command, log):
            log.write_text("no space left")
            return vllm_cost.subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])

        monkeypatch.setattr(vllm_cost, "_start", start)
        monkeypatch.setattr(vllm_cost, "_jobs", lambda: [["module", "mhc", "4096", "1"]])
        processes = {}
        with pytest.raises(SideError, match=r"exit code 3.*\n.*no space left"):
            vllm_cost.prepare(tmp_path, "slice", tmp_path, Clock(100), processes)
        assert list(processes) == ["checkpoint", "mhc 4096 1"]
        for process in processes.values():
            process.wait()

    def test_a_short_run_starts_engines_too(self):
        """What is kept for measuring is a share of a short limit: it once was all of it, and no engine got to start."""
        assert Clock(390, lambda: 0.0).left_to_start() == 390 - vllm_cost._MEASURING
        assert Clock(160, lambda: 0.0).left_to_start() == pytest.approx(88)

    def test_what_is_compiled_ahead_is_named_by_the_shapes_of_flash(self):
        jobs = vllm_cost._jobs()
        assert len({tuple(job) for job in jobs}) == len(jobs) == 14
        for job in jobs:
            assert job[0] == "aligned_e2e.vllm_cost_engine"
            assert job[1] in ("product", "mhc")


def test_every_plan_is_replaced_and_vllm_starts_no_plug_ins_in_other_processes(monkeypatch):
    from bi_kernels.runtime import hooks
    from bi_kernels.runtime.packages import PACKAGES

    modules = [importlib.import_module(f"{name}.vllm_hook") for name in PACKAGES.values()]
    plans = [module.PLAN for module in modules]
    for module, plan in zip(modules, plans, strict=True):
        monkeypatch.setattr(module, "PLAN", plan)
    proof = importlib.import_module("bi_moe_deepep.deep_gemm_proof")
    monkeypatch.setattr(proof, "prove_deep_gemm", proof.prove_deep_gemm)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    loaded = []
    plugins = types.ModuleType("vllm.plugins")
    plugins.load_general_plugins = lambda: loaded.append([module.PLAN for module in modules])
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.plugins", plugins)

    with pytest.raises(RuntimeError, match="bi-moe-deepep"):
        vllm_cost_engine.activate_untested()  # nothing became active

    monkeypatch.setattr(hooks, "active_records", lambda: dict.fromkeys(PACKAGES))
    for module, plan in zip(modules, plans, strict=True):
        monkeypatch.setattr(module, "PLAN", plan)
    vllm_cost_engine.activate_untested()
    for plan in loaded[-1]:
        assert plan.patches
        assert not plan.self_tests
        assert not plan.contracts
    assert vllm_cost_engine.os.environ["VLLM_PLUGINS"] == "none"


class Output:
    """What vLLM's engine returns of a request in a step."""

    def __init__(self, name, finished):
        self.request_id, self.finished = name, finished


class StandInEngine:
    """vLLM's engine: a request draws a token a step, the first one in the step that takes its prompt.

    With asynchronous scheduling the outputs of a step come with the next.
    """

    def __init__(self, runner):
        self.left, self.tokens_of_steps, self.runner = {}, [], runner
        self.asynchronous, self.held = False, []

    def add_request(self, name, prompt, parameters):
        assert prompt["type"] == "token"
        self.left[name] = [parameters.max_tokens, len(prompt["prompt_token_ids"])]

    def abort_request(self, names):
        for name in names:
            del self.left[name]

    def step(self):
        outputs = self.launch()
        if self.asynchronous:
            outputs, self.held = self.held, outputs
        return outputs

    def launch(self):
        if not self.left:
            return []
        self.tokens_of_steps.append(sum(prompt or 1 for _, prompt in self.left.values()))
        self.runner.cudagraph_dispatcher.dispatch(num_tokens=1)
        self.runner._model_forward()
        outputs = []
        for name, state in tuple(self.left.items()):
            state[0] -= 1
            state[1] = 0
            outputs.append(Output(name, state[0] == 0))
            if state[0] == 0:
                del self.left[name]
        return outputs


class Clocked:
    """A CUDA event."""

    def __init__(self, enable_timing):
        pass

    def record(self):
        pass

    def elapsed_time(self, other):
        return 0.25


class Part(torch.nn.Module):
    """A module of the model."""

    def forward(self, x):
        return x + 1


def stand_in_model():
    """Three layers, of which the last has the experts of the first."""
    layers = []
    for ratio in (1, 4, 128):
        layer, attention, ffn = Part(), Part(), Part()
        attention.compress_ratio = ratio
        attention.compressor = Part() if ratio > 1 else None
        attention.indexer = Part() if ratio == 4 else None
        for name in ("attn_gemm_parallel_execute", "forward_mqa", "_o_proj"):
            setattr(type(attention), name, lambda self, x: x)
        ffn.gate, ffn.shared_experts, ffn.experts = Part(), Part(), Part()
        ffn.experts.router = types.SimpleNamespace(select_experts=lambda x: (x, x.int()))
        layer.attn, layer.ffn = attention, layers[0].ffn if len(layers) == 2 else ffn
        layers.append(layer)
    model = Part()
    model.config = types.SimpleNamespace(vocab_size=1000)
    model.model, model.logits_processor = Part(), Part()
    model.model.embed_tokens, model.model.norm = Part(), Part()
    model.model.layers = torch.nn.ModuleList(layers)
    return model


@pytest.fixture
def cost_engine(monkeypatch, tmp_path, request):
    """A ``CostEngine`` whose vLLM and whose GPU are stand-ins."""
    model = stand_in_model()

    class Sampler(Part):
        compute_logprobs = staticmethod(lambda x: x)

    modes = []

    def dispatch(**arguments):
        modes.append(arguments.get("valid_modes"))
        return types.SimpleNamespace(name="FULL" if made.graphs and modes[-1] is None else "NONE"), None

    def forward():
        for number, layer in enumerate(model.model.layers):
            layer.ffn.experts.router.select_experts(torch.arange(8).clamp(max=3 + number))

    runner = types.SimpleNamespace(
        _model_forward=forward,
        cudagraph_dispatcher=types.SimpleNamespace(dispatch=dispatch),
        sampler=Sampler(),
        get_model=lambda: model,
    )
    engine = StandInEngine(runner)
    worker = types.SimpleNamespace(worker=types.SimpleNamespace(model_runner=runner))
    core = types.SimpleNamespace(model_executor=types.SimpleNamespace(driver_worker=worker))
    engine.engine_core = types.SimpleNamespace(engine_core=core)
    models = "vllm.models.deepseek_v4.nvidia.model"
    names = (
        "vllm",
        models,
        "vllm.config",
        "vllm.sampling_params",
        "vllm.v1",
        "vllm.v1.worker",
        "vllm.v1.worker.gpu_worker",
    )
    modules = {name: types.ModuleType(name) for name in names}
    modules[models].DeepseekV4DecoderLayer = type("Layer", (), {"__init__": lambda layer, prefix: None})
    modules[models].DeepseekV4MoE = None
    own = modules[models].DeepseekV4DecoderLayer.__init__

    def start(model, **settings):
        shared = modules[models].DeepseekV4DecoderLayer.__init__ is not own
        return types.SimpleNamespace(llm_engine=engine, shared=shared)

    modules["vllm"].LLM = start
    modules["vllm"].SamplingParams = types.SimpleNamespace
    modules["vllm.sampling_params"].RequestOutputKind = types.SimpleNamespace(DELTA=1)
    modules["vllm.config"].CUDAGraphMode = types.SimpleNamespace(NONE="none")
    modules["vllm.v1.worker"].gpu_worker = modules["vllm.v1.worker.gpu_worker"]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Clocked)
    (tmp_path / "config.json").write_text(json.dumps(getattr(request, "param", {})))
    made = vllm_cost_engine.CostEngine(str(tmp_path), {}, aligned=False)
    made.asked_modes, made.graphs = modes, True
    return made


class TestEngine:
    """``CostEngine`` on stand-ins."""

    @pytest.mark.parametrize(
        "cost_engine", [{}, {"attention_of": [0, 1, 2], "ffn_of": [0, 1, 0]}], indirect=True, ids=["own", "shared"]
    )
    def test_layers_share_where_the_checkpoint_says_so_and_it_is_checked(self, cost_engine, monkeypatch):
        shared = cost_engine.sharing is not None
        assert cost_engine.llm.shared is shared
        method = types.SimpleNamespace(fp8_backend="b", experts_cls="c")
        layers = cost_engine.model.model.layers
        layers[0].ffn.experts.routed_experts = types.SimpleNamespace(quant_method=method)
        for layer in layers[:2]:
            layer.ffn.w13 = torch.nn.Parameter(torch.zeros(2**18))
        cost_engine.engine.vllm_config = types.SimpleNamespace(
            scheduler_config=types.SimpleNamespace(async_scheduling=True)
        )
        caches = vllm_cost_engine.SETTINGS["kv_cache_memory_bytes"]
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**32))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: caches + 2**21)
        found = cost_engine.describe()
        assert (found["layers"], found["ratios"], found["gpu_gib"]) == (3, [0, 4, 128], 3)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: caches + (6 << 30))
        with pytest.raises(SharingError, match="copy") if shared else contextlib.nullcontext():
            cost_engine.describe()
        layers[2].ffn = Part()
        layers[2].ffn.w13 = torch.nn.Parameter(torch.zeros(2**18))
        with pytest.raises(SharingError, match=r"layer 2 has ffn\.w13") if shared else contextlib.nullcontext():
            cost_engine.describe()

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_filling_keeps_the_steps_of_stock_at_the_sizes_that_are_compiled(self, cost_engine, asynchronous):
        cost_engine.engine.asynchronous = asynchronous
        assert cost_engine.fill(8, 4096) == 8
        assert cost_engine.engine.tokens_of_steps == [8192, 8194, 8196, 8198] + [8] * asynchronous
        assert cost_engine.keep(3) == 3
        assert len(cost_engine.engine.left) == 3

    @pytest.mark.parametrize("warm", [0, 2])
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_tokens_are_those_of_the_steps(self, cost_engine, asynchronous, warm):
        cost_engine.engine.asynchronous = asynchronous
        cost_engine.fill(4, 4096)
        steps = cost_engine.engine.tokens_of_steps
        for kind, batch, length, each in (("decode", 4, 0, 4), ("mixed", 4, 2048, 2052)):
            steps.clear()
            found = cost_engine.measure(kind, batch, length, 3, warm)
            drained = [4] * (asynchronous and kind == "mixed")  # for the outputs of the last step
            assert steps == [each] * (warm + 3) + drained
            assert found["tokens"] == 3 * each
            assert (found["forward_us"], found["forwards"], found["modes"]) == (250, 1, {"FULL": 3})
        cost_engine.keep(0)
        steps.clear()
        assert cost_engine.measure("prefill", 8, 1024, 2, warm)["tokens"] == 2 * 8192
        assert steps == [8192] * (warm + 2)
        assert cost_engine.engine.left == {}

    def test_another_number_of_requests_is_an_error(self, cost_engine):
        cost_engine.fill(2, 4096)
        with pytest.raises(RuntimeError, match="expected 4 running requests, got 2"):
            cost_engine.measure("decode", 4, 0, 1)

    def test_ranges_name_the_ops_while_they_are_on_and_leave_nothing_behind(self, cost_engine, monkeypatch):
        seen = []

        @contextlib.contextmanager
        def record_function(name):
            seen.append(name)
            yield

        monkeypatch.setattr(torch.profiler, "record_function", record_function)
        x = torch.zeros(1)
        layers = cost_engine.model.model.layers
        layer = layers[1]

        def forward(x):
            """As a decoder layer's: its parts are called while it is."""
            layer.attn(x), layer.attn.forward_mqa(x), layer.attn.indexer(x), layer.ffn.gate(x)
            return layer.ffn.experts.router.select_experts(x), layer.ffn.shared_experts(x)

        layer.forward = forward
        for number in (0, 2):
            layers[number].forward = lambda x, number=number: layers[number].ffn(x)
        with cost_engine._ranges():
            layers[0](x), layer(x), layers[2](x)
            cost_engine.model.logits_processor(x), cost_engine.runner.sampler.compute_logprobs(x)
        assert layers[0].ffn is layers[2].ffn
        assert seen == [
            label("mHC", 0),
            label("experts", 0),
            label("mHC", 1),
            label("attention: norms, q, KV insert", 1),
            label("attention: sparse MLA", 1),
            label("indexer", 1),
            label("router", 1),
            label("router", 1),
            label("shared experts", 1),
            label("mHC", 2),
            label("experts", 2),  # once, and of the layer that it is called in
            label("lm_head"),
            label("log_softmax"),
        ]
        seen.clear()
        layers[0](x), layer(x)
        assert seen == []
        assert layer.forward is forward

    def test_a_profile_has_the_times_of_graphs_and_the_ranges_of_eager_steps(self, cost_engine, monkeypatch):
        eager = [
            event("user_annotation", label("mHC", 0), 0, 99),
            *kernel("k", 1, 20, 80, 1),
            *kernel("k", 2, 99, 80, 2),
        ]
        step = eager[:3]
        graph = [*kernel("k", 1, 20, 8, 1), *kernel("k", 2, 30, 8, 2)]
        traces = [step, graph, eager]

        class Tracing:
            def __init__(self, activities):
                pass

            def __enter__(self):
                return self

            def __exit__(self, *error):
                return False

            def export_chrome_trace(self, path):
                with open(path, "w") as file:
                    json.dump({"traceEvents": traces.pop(0)}, file)

        monkeypatch.setattr(torch.profiler, "profile", Tracing)
        cost_engine.fill(1, 4096)
        cost_engine.asked_modes.clear()
        # Layers of 8 tokens choose among 0 to 3, to 4, to 5.
        replayed = Profile([OpTime(0, "mHC", "k", us=8, calls=1)], {}, experts=5)
        assert cost_engine.profile("decode", 1, 0, 2) == replayed
        assert cost_engine.asked_modes == [None] + [{"none"}] * 2 + [None] * 2
        cost_engine.graphs = False  # prompts are too long for any graph
        whole = [OpTime(0, "mHC", "k", us=79.5, calls=1)]
        assert cost_engine.profile("prefill", 1, 4096, 2) == Profile(whole, {"mHC": 49.5}, experts=5)
        assert traces == []
        cost_engine.graphs, traces[:] = True, [step, []]  # graphs that hide their kernels
        assert cost_engine.profile("decode", 1, 0, 2) == Profile([OpTime(0, "mHC", "k", us=80, calls=1)], {}, 5)
        assert traces == []
