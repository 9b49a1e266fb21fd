# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""python benchmarks SUITE [options]: what staging costs, measured on this machine; a suite is a module beside this."""

from __future__ import annotations

import argparse
import importlib
import sys

SUITES = {
    "bulk": "large uploads of pageable blocks and rows, and the pinning of a new pool",
    "cache_manager": "a cache manager's tables and metadata, call by call and over a trace's steps",
    "event_query": "what polling a fence costs, which is why fences are polled in batches",
    "gather": "gather_rows against index_select, take and memcpy, from cold and cached tables",
    "overhead": "host time of copy_ against what users write today, and the driver floor",
    "small": "host time of copy_batch_ and to_device against what users write today",
    "soak": "minutes of mixed traffic, every byte verified on the device",
    "tables": "host time of block tables, KV rows and block lists against what engines write today",
    "threads": "copies of 1 to 8 threads through one pool: rates, and p99 under load",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks", description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name, purpose in SUITES.items():
        suite = suites.add_parser(name, help=purpose, description=purpose)
        suite.add_argument("--json", metavar="FILE", help="write figures and conditions to FILE")
        importlib.import_module(name).add_arguments(suite)
    args = parser.parse_args()
    return importlib.import_module(args.suite).run(args)


if __name__ == "__main__":
    sys.exit(main())
