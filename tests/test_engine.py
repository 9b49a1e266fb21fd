# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""examples/engine: with overlap each request gets the tokens that it gets without, unless the copies are bare."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pinstage import StagingPool
from pinstage.cli.backends import SimulatedBackend, open_backend
from pinstage.testing import SimulatedDevice

ENGINE = Path(__file__).parents[1] / "examples" / "engine"
NAMES = [path.stem for path in ENGINE.glob("*.py") if path.stem != "__main__"]
STEPS = 60


@pytest.fixture
def example(monkeypatch):
    """The example's modules, on one thread: its kernels are too small to share."""
    monkeypatch.syspath_prepend(str(ENGINE))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    torch.set_num_threads(threads)
    for name in NAMES:
        sys.modules.pop(name, None)


def serve_all(example, steps=STEPS, **options):
    with SimulatedDevice(**options) as device:
        return example.comparison.serve_all(SimulatedBackend(device, "in a test"), example.engine.Shape(), 0, steps)


def prompts(example, shape, seed=0):
    return example.workload.prompts(seed, example.model.VOCABULARY, shape.most_tokens)


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_bare_copies_give_most_requests_other_tokens_and_the_others_none(example):
    """Case 1, on a whole engine."""
    served, verdicts = serve_all(example, schedule="late")
    assert verdicts["bare"].wrong > verdicts["bare"].compared / 2
    assert verdicts["event_wait"].wrong == verdicts["pinstage"].wrong == 0
    assert verdicts["pinstage"].tokens > 5 * STEPS
    assert example.comparison.exit_status(verdicts) == 0
    for each in served.values():  # or equal tokens would say little
        assert each.preempted > 0
        assert each.reused_tokens > 0


@pytest.mark.parametrize("seed", range(3))
def test_pinstage_is_right_under_random_schedules(example, seed):
    _, verdicts = serve_all(example, schedule="random", seed=seed)
    assert verdicts["pinstage"].wrong == verdicts["event_wait"].wrong == 0
    assert verdicts["bare"].wrong > 0  # the control: these schedules do race


def test_device_that_never_lags_proves_nothing(example):
    _, verdicts = serve_all(example, schedule="eager")
    assert [verdict.wrong for verdict in verdicts.values()] == [0, 0, 0]
    assert example.comparison.exit_status(verdicts) == 2


@pytest.mark.parametrize("lying", [False, True], ids=["honest", "control"])
def test_pinstage_with_little_memory_waits_and_without_its_fences_is_caught(example, lying, monkeypatch):
    """The control: a fence that always reports "passed" frees the step's slots at once, for the next step's bytes."""
    with SimulatedDevice(schedule="late", lying_queries=lying) as device, StagingPool(device, max_bytes=8192) as pool:
        one_step = partial(example.uploads.PinstageUpload, pool=pool)
        monkeypatch.setitem(example.uploads.UPLOADS, "pinstage", one_step)
        backend = SimulatedBackend(device, "in a test")
        _, verdicts = example.comparison.serve_all(backend, example.engine.Shape(), 0, STEPS)
        assert (verdicts["pinstage"].wrong > 0) == lying
        assert verdicts["event_wait"].wrong == 0  # its wait asks no fence of pinstage
        assert example.comparison.exit_status(verdicts) == lying
        assert lying or pool.stats().waits > 0
        device.synchronize()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["late", "eager", "random", "manual"])
def test_thousand_steps_equal_the_reference(example, schedule):
    served, verdicts = serve_all(example, steps=1000, schedule=schedule)
    assert verdicts["pinstage"].wrong == verdicts["event_wait"].wrong == 0
    assert (verdicts["bare"].wrong > 0) == (schedule != "eager")
    assert served["pinstage"].preempted > 0


@pytest.mark.gpu
def test_engine_on_the_gpu_is_right_with_pinstage_and_wrong_with_bare_copies(example):
    with open_backend("cuda") as backend:
        served, verdicts = example.comparison.serve_all(backend, example.engine.Shape(), 0, 200)
    assert verdicts["pinstage"].wrong == verdicts["event_wait"].wrong == 0
    assert verdicts["bare"].wrong > 0
    assert served["pinstage"].preempted > 0


# --- the engine itself ------------------------------------------------------------------------------------------------


def test_tokens_do_not_depend_on_batching_paging_prefix_reuse_or_preemption(example):
    alone = example.engine.Shape(batch=1, chunk=128, block_tokens=128, width=1, blocks=2)
    together = example.engine.Shape()
    with SimulatedDevice() as device:
        backend = SimulatedBackend(device, "in a test")
        expected, got = (
            example.engine.reference(backend, prompts(example, shape), shape, 0, steps)
            for shape, steps in ((alone, 300), (together, STEPS))
        )
    assert expected.preempted == expected.reused_tokens == 0
    assert got.preempted > 0
    assert got.reused_tokens > 0
    done = sum(map(bool, expected.answers)) - 1
    assert done > 10
    for one, other in islice(zip(expected.answers, got.answers, strict=False), done):
        assert one[: len(other)] == other[: len(one)]
    assert len({token for answer in expected.answers for token in answer}) > 100  # they do vary


def dense_answer(model, tokens, count):
    """What the model says by attention over all tokens at once, without a cache."""
    functional, norm = torch.nn.functional, lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:])
    for _ in range(count):
        x = model._embedding[tokens] + model._place[: len(tokens)]
        for qkv, out, up, down in model._layers:
            q, k, v = (norm(x) @ qkv).view(len(tokens), 3, 2, -1).permute(1, 2, 0, 3)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + attended.transpose(0, 1).flatten(1) @ out
            x = x + functional.gelu(norm(x) @ up) @ down
        tokens = [*tokens, int((norm(x[-1]) @ model._head).argmax())]
    return tokens[-count:]


def test_tokens_are_those_of_the_model_without_a_cache(example):
    shape = example.engine.Shape()
    with SimulatedDevice() as device:
        backend = SimulatedBackend(device, "in a test")
        answers = example.engine.reference(backend, prompts(example, shape), shape, 0, 20).answers
    model = example.model.Model("cpu", 0, shape.batch, shape.blocks, shape.block_tokens, shape.most_tokens)
    served = [(prompt, answer) for prompt, answer in zip(prompts(example, shape), answers, strict=False) if answer]
    assert len(served) > 10
    for prompt, answer in served:
        assert dense_answer(model, prompt.tokens, len(answer)) == answer


def test_only_with_overlap_tokens_go_from_step_to_step_on_the_device(example):
    class Watched(example.uploads.BlockingUpload):
        def _send(self, dsts, srcs, step):
            lowest.append(int(srcs[0].min()))
            super()._send(dsts, srcs, step)

    shape, lowest = example.engine.Shape(), []
    with SimulatedDevice() as device:
        backend = SimulatedBackend(device, "in a test")
        for overlap in (False, True):
            example.engine.Engine(backend, prompts(example, shape), shape, 0, Watched, overlap=overlap).serve(20)
    assert min(lowest[:20]) >= 0
    assert min(lowest[20:]) < 0


def scheduled(example, steps, lag=1, **options):
    """(scheduler, block map, chunks) of each step of a scheduler whose tokens are all 7 and come `lag` steps late."""
    shape = example.engine.Shape(**options)
    block_map = torch.empty(shape.batch, shape.width, dtype=torch.int32)
    cache = example.kv_cache.KvCache(block_map, shape.blocks, shape.block_tokens)
    scheduler = example.scheduler.Scheduler(prompts(example, shape), cache, shape.chunk)
    under_way = []
    for _ in range(steps):
        chunks = scheduler.step()
        yield scheduler, block_map, chunks
        under_way.append(chunks)
        if len(under_way) > lag or not chunks:
            late = under_way.pop(0)
            scheduler.collect(late, [7] * len(late))


def test_block_that_is_written_belongs_to_its_writer_alone(example):
    shared, block_tokens = 0, example.engine.Shape.block_tokens
    for _, _, chunks in scheduled(example, 300):
        writers = {}
        for chunk in chunks:
            first, end = chunk.start // block_tokens, -(-(chunk.start + chunk.count) // block_tokens)
            assert example.kv_cache.NULL_BLOCK not in chunk.sequence.blocks
            for block in chunk.sequence.blocks[first:end]:
                assert writers.setdefault(block, chunk) is chunk
        blocks = [block for chunk in chunks for block in chunk.sequence.blocks]
        shared += len(blocks) - len(set(blocks))
        for chunk in chunks:  # others may have found a block that this very step fills, ahead of anyone who reads it
            first = chunk.start // block_tokens
            for i, block in enumerate(chunk.sequence.blocks):
                assert writers.get(block, chunk) is chunk or i < first
    assert shared > 0


def test_map_holds_the_blocks_of_each_slot_and_null_blocks_behind_them(example):
    for _, block_map, chunks in scheduled(example, 100):
        for chunk in chunks:
            blocks = chunk.sequence.blocks
            row = block_map[chunk.sequence.slot].tolist()
            assert row == blocks + [example.kv_cache.NULL_BLOCK] * (len(row) - len(blocks))
            assert len(blocks) == -(-chunk.sequence.computed // example.engine.Shape.block_tokens)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_scheduler_needs_of_the_device_only_the_last_token_of_a_slot(example, lag):
    made, samples, restarted = {}, 0, 0
    for scheduler, _, chunks in scheduled(example, 300, lag=lag, blocks=40):
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.start + chunk.count > len(sequence.tokens):  # the host has yet to see it
                assert chunk.count == 1
                assert made[sequence] == sequence.slot
            if chunk.samples:
                made[sequence] = sequence.slot
        samples += sum(chunk.samples for chunk in chunks)
        restarted = scheduler.preempted
    assert samples > 300
    assert restarted > 10


def test_sequences_run_in_order_of_arrival_the_preempted_ones_too(example):
    for scheduler, _, chunks in scheduled(example, 200, blocks=60):
        numbers = [scheduler.sequences.index(chunk.sequence) for chunk in chunks]
        assert numbers == sorted(numbers)
    assert scheduler.preempted > 10


def test_free_block_is_found_by_its_contents_until_it_is_taken(example):
    pool = example.kv_cache.BlockPool(3)
    first, second = pool.take(), pool.take()
    assert pool.take() is None
    pool.publish(first, b"contents")
    pool.release(first)
    assert pool.share(b"contents") == first  # free, and remembered
    assert pool.share(b"contents") == first
    pool.release(first)
    assert pool.take() is None  # one user is left
    pool.release(first)
    pool.release(second)
    assert pool.take() == first  # the longest free
    assert pool.share(b"contents") is None
    assert pool.take() == second


def test_key_of_a_block_tells_all_tokens_ahead_of_it(example):
    key = example.kv_cache.block_key
    assert key(key(b"", [1, 2]), [3, 4]) == key(key(b"", [1, 2]), [3, 4])
    assert key(key(b"", [1, 2]), [3, 4]) != key(key(b"", [1, 5]), [3, 4])


def test_cache_that_cannot_hold_one_sequence_is_refused(example):
    with pytest.raises(ValueError, match="8 blocks cannot hold one sequence of 8 and the null block"):
        example.kv_cache.KvCache(torch.empty(2, 8, dtype=torch.int32), blocks=8, block_tokens=4)


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments):
    return subprocess.run([sys.executable, str(ENGINE), *arguments], capture_output=True, text=True, timeout=240)


def test_command_serves_a_trace_and_writes_its_figures(tmp_path):
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:15:{second:02}.6805900,{100 * second + 50},{40 + second}" for second in range(60)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines))
    path = tmp_path / "engine.json"
    done = run("--device", "simulated", "--steps", "40", "--trace", str(trace), "--json", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "of the simulation" in done.stdout
    figures = json.loads(path.read_text())
    assert (figures["device"], figures["steps"]) == ("simulated device", 40)
    assert list(figures["modes"]) == ["reference", "bare", "event_wait", "pinstage"]
    assert figures["modes"]["bare"]["wrong"] > 0
    assert figures["modes"]["pinstage"]["wrong"] == 0
    for mode in figures["modes"].values():
        assert min(mode["tokens_per_second"], mode["host_us_per_step"], mode["upload_us_per_step"]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "'0' is not a positive number"),
        (["--device", "tpu"], "use auto, cuda, cuda:N or simulated"),
        (["--trace", "no/such/file.csv", "--device", "simulated"], "no/such/file.csv: No such file"),
    ],
)
def test_bad_input_is_status_2(arguments, message):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
