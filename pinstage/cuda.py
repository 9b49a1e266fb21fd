# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Fills the core's driver table from the CUDA driver, through cuda-python.

Each entry point is resolved by name and by the CUDA version whose signature the table has, with the legacy default
stream, so that a newer driver cannot hand out another signature under the same name. A missing driver is no error until
a CUDA device is asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from pinstage import _core, numa
from pinstage.errors import DriverError


def _checked(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a cuda-python call, which returns (status, value)."""
    status = int(result[0])
    if status != 0:
        raise DriverError(f"{call} failed: {result[0]!r}", status)
    return result[1] if len(result) > 1 else None


def resolve_entries() -> dict[str, int]:
    """Addresses of the driver's entry points, by CUDA name.

    Raises:
        DriverError: no CUDA driver is installed, or it lacks a required entry point.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(f"cuda-bindings cannot be imported ({error}); pip install cuda-bindings") from error
    legacy = driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM
    addresses = {}
    for name, version, required in _core.driver_entries():
        status, address, _ = driver.cuGetProcAddress(name.encode(), version, int(legacy))
        if int(status) == 0 and address:
            addresses[name] = int(address)
        elif required:
            raise DriverError(f"the CUDA driver has no {name} of CUDA {version}: {status!r}", int(status))
    return addresses


def driver_version() -> int:
    """The CUDA version of the installed driver: 12080 for 12.8.

    Raises:
        DriverError: no CUDA driver is installed.
    """
    from cuda.bindings import driver

    return int(_checked("cuDriverGetVersion", driver.cuDriverGetVersion()))


def numa_node(index: int) -> int | None:
    """The NUMA node near the GPU `index`; None where there is no choice of nodes, or the platform does not tell."""
    from cuda.bindings import driver

    status, address = driver.cuDeviceGetPCIBusId(32, _checked("cuDeviceGet", driver.cuDeviceGet(index)))
    return numa.node_near(address.split(b"\0")[0].decode()) if int(status) == 0 else None


def open_device(index: int, overrides: dict[str, int] | None = None) -> _core.Device:
    """Sets the GPU `index` up, in its primary context (which torch uses too).

    Args:
        index: the CUDA device's number, as torch counts.
        overrides: addresses that replace entry points; for tests.

    Raises:
        DriverError: there is no such GPU, or no driver.
    """
    if not torch.cuda.is_available():
        raise DriverError(
            "no CUDA device is available here; pass device=pinstage.testing.SimulatedDevice() to run without one"
        )
    if not 0 <= index < torch.cuda.device_count():
        raise DriverError(f"there is no cuda:{index}; {torch.cuda.device_count()} CUDA devices are visible")
    from cuda.bindings import driver

    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it so
    handle = _checked("cuDeviceGet", driver.cuDeviceGet(index))
    context = _checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(handle))
    device = _core.Device.cuda({**resolve_entries(), **(overrides or {})}, int(context), index)
    device.numa_node = numa_node(index)
    return device
