# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0
"""`pinstage demo`: its verdict rests on the device's bytes, and it says so when they prove nothing."""

import json
import sys
from itertools import islice

import pytest
import torch

from pinstage import StagingPool
from pinstage.cli import main
from pinstage.cli.backends import SimulatedBackend
from pinstage.cli.demo import run_on
from pinstage.cli.errors import UsageError
from pinstage.cli.kv_cache import BLOCK_TOKENS, NO_BLOCK, PagedKvCache, Scheduler, TableShape
from pinstage.cli.overlap import Workload, measure
from pinstage.cli.traffic import CODE, CONVERSATION, PROBABILITIES, Request, generate, read_trace, repeat
from pinstage.cli.uploads import UPLOADS, PinstageUpload
from pinstage.testing import SimulatedDevice

SHAPE = TableShape.of(pools=2, batch=32, blocks=32)
WORKLOAD = Workload(SHAPE, steps=80)
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def backend(device):
    return SimulatedBackend(device, "in a test")


def pinstage_with_one_slot(backend, shape):
    return PinstageUpload(backend, shape, StagingPool(backend.device, max_bytes=shape.nbytes))


def wrong_steps(path):
    return {mode: figures["wrong_steps"] for mode, figures in json.loads(path.read_text())["modes"].items()}


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_bare_copy_is_wrong_in_most_steps_and_the_others_never(tmp_path):
    with SimulatedDevice(schedule="late") as device:
        assert run_on(backend(device), WORKLOAD, tmp_path / "demo.json") == 0
    wrong = wrong_steps(tmp_path / "demo.json")
    assert wrong["bare"] > WORKLOAD.steps / 2
    assert wrong["event_wait"] == wrong["pinstage"] == 0


def test_pinstage_without_its_fences_is_caught(tmp_path, capsys, monkeypatch):
    # The control: a fence that always reports "passed" frees the only slot at once, for the next step's bytes.
    monkeypatch.setitem(UPLOADS, "pinstage", pinstage_with_one_slot)
    with SimulatedDevice(schedule="late", lying_queries=True) as device:
        assert run_on(backend(device), WORKLOAD, tmp_path / "demo.json") == 1
    wrong = wrong_steps(tmp_path / "demo.json")
    assert wrong["pinstage"] > WORKLOAD.steps / 2
    assert wrong["event_wait"] == 0  # its wait asks no pinstage fence
    assert "FAILED" in capsys.readouterr().out


def test_pinstage_with_one_slot_is_right_by_waiting():
    with SimulatedDevice(schedule="late") as device:
        upload = pinstage_with_one_slot(backend(device), SHAPE)
        assert measure(backend(device), WORKLOAD, upload).wrong_steps == 0


def test_device_that_never_lags_proves_nothing(tmp_path, capsys):
    with SimulatedDevice(schedule="eager") as device:
        assert run_on(backend(device), WORKLOAD, tmp_path / "demo.json") == 2
    assert wrong_steps(tmp_path / "demo.json") == {"bare": 0, "event_wait": 0, "pinstage": 0}
    assert "PROVED NOTHING" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(3))
def test_pinstage_is_right_under_random_schedules(seed):
    with SimulatedDevice(schedule="random", seed=seed) as device:
        uploads = {mode: upload(backend(device), SHAPE) for mode, upload in UPLOADS.items()}
        wrong = {mode: measure(backend(device), WORKLOAD, upload).wrong_steps for mode, upload in uploads.items()}
    assert wrong["pinstage"] == wrong["event_wait"] == 0
    assert wrong["bare"] > 0  # the control: these schedules do race


def test_runs_longer_than_the_records_are_judged_in_parts(monkeypatch):
    monkeypatch.setattr("pinstage.cli.overlap._RECORDED_BYTES", 20 * SHAPE.nbytes)
    with SimulatedDevice(schedule="late") as device:
        upload = UPLOADS["bare"](backend(device), SHAPE)
        result = measure(backend(device), WORKLOAD, upload)
    assert result.steps == 80
    assert 40 < result.wrong_steps <= 80 - 4  # the last step of each part is drained before the next refill


# --- the command ------------------------------------------------------------------------------------------------------


def test_json_holds_exactly_the_documented_figures(tmp_path):
    path = tmp_path / "demo.json"
    assert main(["demo", "--device", "simulated", "--steps", "40", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert set(figures) == {"device", "steps", "modes"}
    assert (figures["device"], figures["steps"]) == ("simulated device", 40)
    assert list(figures["modes"]) == ["bare", "event_wait", "pinstage"]
    types = {"wrong_steps": int, "host_us_per_step": float, "stall_us_per_step": float, "pinned_bytes": int}
    for mode in figures["modes"].values():
        assert {name: type(value) for name, value in mode.items()} == types
        assert mode["host_us_per_step"] > 0


def test_output_tells_the_device_and_whose_times_they_are(capsys):
    assert main(["demo", "--device", "simulated", "--steps", "40"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for text in ("simulated device (as asked for)", "[1, 64, 2, 128] int32, 64 KiB", "of 40", "not of a GPU"):
        assert text in out


def test_trace_is_served(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:15:{second:02}.6805900,{100 * second + 50},{40 + second}" for second in range(60)]
    trace.write_text(HEADER + "\n".join(lines))
    arguments = ["--device", "simulated", "--steps", "60", "--trace", str(trace)]
    assert main(["demo", *arguments]) in (0, 2)  # a request a second is little traffic: it may prove nothing
    assert "trace.csv" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["dmo"], "invalid choice"),
        (["demo", "--steps", "0"], "'0' is not a positive number"),
        (["demo", "--batch", "-3"], "'-3' is not a positive number"),
        (["demo", "--device", "tpu"], "use auto, cuda, cuda:N or simulated"),
        (["demo", "--device", "cuda:"], "use auto, cuda, cuda:N or simulated"),
        (["demo", "--device", "cuda:x"], "use auto, cuda, cuda:N or simulated"),
        (["demo", "--trace", "no/such/file.csv"], "no/such/file.csv: No such file"),
        (["demo", "--json", "no/such/demo.json"], "no/such/demo.json: No such file"),
        (["demo", "--batch", "10000000"], "use fewer --pools, --batch or --blocks"),
    ],
)
def test_bad_input_gives_one_line_and_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("pinstage: ")
    assert err.count("\n") == 1


def test_cuda_where_there_is_none_is_bad_input(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 2
    assert "no GPU here; use --device simulated" in capsys.readouterr().err


def test_cuda_device_out_of_range_is_bad_input(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["demo", "--device", "cuda:2"]) == 2
    assert "there is no cuda:2; torch sees 2 GPUs" in capsys.readouterr().err


def test_missing_extra_is_named(monkeypatch, capsys):
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["demo", "--device", "simulated"]) == 2
    assert capsys.readouterr().err == 'pinstage: rich is not installed; pip install "pinstage[cli]"\n'


def test_interrupt_exits_with_130(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, "fill", interrupted)
    assert main(["demo", "--device", "simulated"]) == 130
    assert capsys.readouterr().err == "pinstage: interrupted\n"


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", [CONVERSATION, CODE], ids=["conversation", "code"])
def test_generator_has_the_quantiles_of_the_service(service):
    requests = list(islice(generate(7, [service]), 20_000))
    for name in ("context_tokens", "generated_tokens"):
        lengths = torch.tensor([getattr(request, name) for request in requests], dtype=torch.float64)
        expected = getattr(service, name)
        for probability, quantile in zip(PROBABILITIES, expected, strict=True):
            below, up_to = ((lengths < quantile).double().mean(), (lengths <= quantile).double().mean())
            # Four standard deviations of a share of 20,000. Between the two, because lengths are whole numbers.
            assert below - 0.014 <= probability <= up_to + 0.014, (name, probability)
        assert lengths.min() >= 1
        assert lengths.max() <= expected[-1]
    assert len(requests) / requests[-1].arrival == pytest.approx(service.per_second, rel=0.05)


def test_one_seed_gives_one_sequence():
    first, again, other = (list(islice(generate(seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_trace_is_read_in_order_of_arrival(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        HEADER + "2023-11-16 18:17:04.5000000,7,8\n2023-11-16 18:17:03.2500000,374,44\n2023-11-16 18:17:05,1,2"
    )
    assert read_trace(path) == [Request(0.0, 374, 44), Request(1.25, 7, 8), Request(1.75, 1, 2)]


def test_trace_repeats_after_its_end():
    arrivals = [request.arrival for request in islice(repeat([Request(0.0, 1, 1), Request(2.0, 1, 1)]), 5)]
    assert arrivals == [0.0, 2.0, 3.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ":1: no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens\n", ":1: no column GeneratedTokens"),
        (HEADER, "holds no requests"),
        (HEADER + "2023-11-16 18:17:03.97,5,6\n2023-11-16 18:17:04,5\n", ":3: the line ends before GeneratedTokens"),
        (HEADER + "yesterday,5,6\n", ":2: TIMESTAMP is 'yesterday'"),
        (HEADER + "2023-11-16 18:17:03.x,5,6\n", ":2: TIMESTAMP is '2023-11-16 18:17:03.x'"),
        (HEADER + "2023-11-16 18:17:03,many,6\n", ":2: ContextTokens is 'many'"),
        (HEADER + "2023-11-16 18:17:03,5,0\n", ":2: GeneratedTokens is '0'"),
        (b"\xff\xfe\x00", "is no CSV file"),
    ],
)
def test_malformed_trace_is_refused_with_its_line(content, message, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as error:
        read_trace(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


# --- the cache --------------------------------------------------------------------------------------------------------


def test_no_block_belongs_to_two_requests_and_rows_are_compact():
    shape = TableShape.of(pools=2, batch=8, blocks=16)
    scheduler, table = Scheduler(generate(3), shape, seed=3), torch.empty(*shape, dtype=torch.int32)
    for _ in range(300):
        scheduler.step()
        scheduler.fill(table)
        used = table[:, :, 0] != NO_BLOCK
        for pool in range(shape.pools):
            keys, values = (table[pool, :, plane][used[pool]] for plane in (0, 1))
            assert keys.unique().numel() == keys.numel()
            assert torch.equal(values, keys + 1)
            assert (keys >= 0).all()
            assert (keys < 2 * shape.batch * shape.blocks).all()
        rows = used[0].any(1).tolist()
        assert rows == sorted(rows, reverse=True)


def test_released_blocks_are_used_again():
    shape = TableShape.of(pools=1, batch=2, blocks=4)
    cache, table = PagedKvCache(shape, seed=0), torch.empty(*shape, dtype=torch.int32)
    for _ in range(50):  # far more than the pool holds, were they not returned
        slot = cache.open_slot()
        cache.grow(slot, 4 * BLOCK_TOKENS)
        cache.fill(table, [slot])
        assert (table[0, 0] != NO_BLOCK).all()
        assert (table[0, 1] == NO_BLOCK).all()
        cache.release(slot)
    assert cache.has_room


# --- a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_demo_passes_on_the_gpu(tmp_path):
    path = tmp_path / "demo.json"
    assert main(["demo", "--device", "cuda", "--steps", "300", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert torch.cuda.get_device_name() in figures["device"]
    wrong = wrong_steps(path)
    assert wrong["bare"] >= 150
    assert wrong["event_wait"] == wrong["pinstage"] == 0
