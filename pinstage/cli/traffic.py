# Copyright (c) 2026 The pinstage authors.
# SPDX-License-Identifier: Apache-2.0

"""Requests to serve: drawn from the length distributions of two real services, or read from a trace file."""

from __future__ import annotations

import csv
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from pinstage.cli.errors import UsageError

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Where the quantiles of `Service` lie. 0 is not known of the traces: one token.
PROBABILITIES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        arrival: seconds since the first request.
        context_tokens: length of the prompt.
        generated_tokens: length of the answer.
    """

    arrival: float
    context_tokens: int
    generated_tokens: int


@dataclass(frozen=True)
class Service:
    """The traffic of a service: mean arrivals per second, and lengths in tokens at `PROBABILITIES`."""

    per_second: float
    context_tokens: tuple[int, ...]
    generated_tokens: tuple[int, ...]

    def draw(self, arrival: float, rng: random.Random) -> Request:
        """A request at `arrival` seconds whose lengths follow the quantiles."""
        return Request(
            arrival, _interpolate(self.context_tokens, rng.random()), _interpolate(self.generated_tokens, rng.random())
        )


# Quantiles of the Azure LLM inference traces of November 2023 (Azure Public Dataset, CC-BY 4.0); Patel et al.,
# "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024.
CONVERSATION = Service(5.5, (1, 181, 396, 1020, 1189, 4083, 4142, 14050), (1, 41, 85, 129, 395, 451, 601, 1000))
CODE = Service(2.6, (1, 75, 578, 1469, 2744, 7303, 7436, 7437), (1, 6, 9, 13, 24, 90, 251, 1899))


def _interpolate(quantiles: Sequence[int], probability: float) -> int:
    """The inverse of the distribution function that joins the quantiles by straight lines."""
    after = bisect_right(PROBABILITIES, probability)  # 1 or more, and in range: 0 <= probability < 1
    low, high = PROBABILITIES[after - 1], PROBABILITIES[after]
    share = (probability - low) / (high - low)
    return round(quantiles[after - 1] + share * (quantiles[after] - quantiles[after - 1]))


def generate(seed: int, services: Sequence[Service] = (CONVERSATION, CODE)) -> Iterator[Request]:
    """Requests without end, in order of arrival, to `services` together. One seed gives one sequence."""
    rng = random.Random(seed)
    rates = [service.per_second for service in services]
    arrival = 0.0
    while True:
        yield rng.choices(services, rates)[0].draw(arrival, rng)
        arrival += rng.expovariate(sum(rates))


def read_trace(path: Path) -> list[Request]:
    """Reads a trace: CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens, one request a line.

    Args:
        path: the file. TIMESTAMP is a date and time in ISO format, with any number of decimals.

    Returns:
        The requests in order of arrival; the first arrives at 0 s.

    Raises:
        UsageError: the file cannot be read, lacks a column or any request, or a line is malformed.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise UsageError(f"{path}:1: no column {', '.join(missing)}; the first line must name the columns")
            requests = [_parse(row, f"{path}:{reader.line_num}") for row in reader]
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is no CSV file: {error}") from error
    if not requests:
        raise UsageError(f"{path} holds no requests")
    requests.sort(key=lambda request: request.arrival)
    start = requests[0].arrival
    return [Request(each.arrival - start, each.context_tokens, each.generated_tokens) for each in requests]


def _parse(row: dict[str, str | None], where: str) -> Request:
    values = []
    for column in _COLUMNS:
        text = row[column]
        if text is None:
            raise UsageError(f"{where}: the line ends before {column}")
        values.append(text.strip())
    timestamp, context, generated = values
    return Request(
        _seconds(timestamp, where), _count(context, _COLUMNS[1], where), _count(generated, _COLUMNS[2], where)
    )


def _seconds(text: str, where: str) -> float:
    whole, _, decimals = text.partition(".")  # traces have seven, fromisoformat() of Python 3.10 takes three or six
    try:
        if decimals and not decimals.isdecimal():
            raise ValueError
        return datetime.fromisoformat(whole).replace(tzinfo=timezone.utc).timestamp() + float(f"0.{decimals or 0}")
    except ValueError:
        raise UsageError(f"{where}: TIMESTAMP is {text!r}, not a date and time like 2023-11-16 18:15:46.68") from None


def _count(text: str, column: str, where: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{where}: {column} is {text!r}, not a positive number of tokens")
    return int(text)


def repeat(requests: Sequence[Request]) -> Iterator[Request]:
    """The requests of a trace, over and over, each round after the one before."""
    period = requests[-1].arrival + 1.0
    start = 0.0
    while True:
        for request in requests:
            yield Request(start + request.arrival, request.context_tokens, request.generated_tokens)
        start += period
