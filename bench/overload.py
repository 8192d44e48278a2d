"""Measures goodput under overload: a slow model, a bounded queue, and clients that do not slow down, as Markdown.

    .venv/bin/python bench/overload.py [--seconds 10] [--execute-ms 20] [--instances 2] [--queue 8] [--rates 0.5,1,2,4]

The model is identity with a delay, so that what it can sustain does not depend on the machine: `instances` requests at
the same time, each for `execute-ms`. That rate is measured first, by clients that wait for their answers. Then requests
arrive at multiples of it in an open loop (exponential gaps, seeded; an arrival never waits for an earlier answer), each
on a connection of its own choosing out of a pool.

An answer is good when it is 200 within the time limit of its client, who closes the connection when the time is over.
Goodput is good answers a second. The bounded queue refuses the rest at once with 503 and `Retry-After`; the second model,
whose queue has no bound, shows what happens without. The server's own statistics say how many executions there were: one
for which nobody waited any more is wasted.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "python"))
import fixtures  # noqa: E402
from server import Server  # noqa: E402

BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}).encode()
# Connections that may be open at the same time; arrivals beyond them are counted as not sent.
MAX_OPEN = 2000


def lay(repository: Path, options: argparse.Namespace) -> None:
    """`bounded` and `unbounded`, alike but for their queues."""
    instances = f"instance_group [ {{ kind: KIND_CPU count: {options.instances} }} ]\n"
    delay = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{options.execute_ms}" }} }}\n'
    for name, policy in (("bounded", f"default_queue_policy {{ max_queue_size: {options.queue} }}"), ("unbounded", "")):
        batching = f"dynamic_batching {{ {policy} }}\n"
        fixtures.echo(repository, name, "FP32", batch=1, dims="[ 1 ]", more=instances + delay + batching)


def executions(server: Server, model: str) -> int:
    status, body = server.get(f"/v2/models/{model}/stats")
    if status != 200:
        sys.exit(f"no statistics of {model}: {status} {body[:200]!r}")
    return json.loads(body)["model_stats"][0]["execution_count"]


# ---- clients


@dataclass
class Outcome:
    """Times in seconds from the arrival of each request to what became of it."""

    good: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    hints: int = 0
    late: int = 0
    failed: int = 0
    not_sent: int = 0


class Clients:
    """Connections to one model, kept open between requests."""

    def __init__(self, port: int, model: str, limit: float) -> None:
        self.port, self.limit = port, limit
        self.request = (
            f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY
        )
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.open = 0

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, bool]:
        """Status of the answer, and whether it says when to come again."""
        writer.write(self.request)
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        lengths = [int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")]
        await reader.readexactly(lengths[0] if lengths else 0)
        return int(lines[0].split(b" ")[1]), any(line.startswith(b"retry-after:") for line in lines)

    async def ask(self, outcome: Outcome) -> int | None:
        """One request with its time limit; gives the status."""
        begin = time.monotonic()
        if not self.idle and self.open >= MAX_OPEN:
            outcome.not_sent += 1
            return None
        self.open += 1
        pair = self.idle.pop() if self.idle else None
        try:
            async with asyncio.timeout(self.limit):
                pair = pair or await asyncio.open_connection("127.0.0.1", self.port)
                status, hint = await self.exchange(*pair)
        except TimeoutError:
            outcome.late += 1
            status = None
        except (OSError, asyncio.IncompleteReadError):
            outcome.failed += 1
            status = None
        took = time.monotonic() - begin
        self.open -= 1
        if status is None:
            if pair:
                pair[1].close()
            return None
        self.idle.append(pair)
        if status == 200:
            outcome.good.append(took)
        elif status == 503:
            outcome.refused.append(took)
            outcome.hints += hint
        else:
            outcome.failed += 1
        return status

    def close(self) -> None:
        for _, writer in self.idle:
            writer.close()


async def sustainable(port: int, model: str, clients: int, seconds: float) -> float:
    """Answers a second when as many clients as there are instances, and one more, wait for their answers."""
    connections = Clients(port, model, limit=60)
    outcome = Outcome()
    begin = time.monotonic()

    async def client() -> None:
        while time.monotonic() < begin + seconds:
            await connections.ask(outcome)

    await asyncio.gather(*(client() for _ in range(clients)))
    rate = len(outcome.good) / (time.monotonic() - begin)
    connections.close()
    if not outcome.good or outcome.failed or outcome.refused:
        sys.exit(f"the model does not answer as it should: {outcome}")
    return rate


async def open_loop(port: int, model: str, rate: float, seconds: float, limit: float, seed: int) -> tuple[Outcome, int]:
    """Requests that arrive at `rate` a second, whatever becomes of them; gives how many there were, too."""
    connections = Clients(port, model, limit)
    outcome = Outcome()
    gaps = random.Random(seed)
    tasks: set[asyncio.Task] = set()
    begin = time.monotonic()
    at, count = begin, 0
    while (at := at + gaps.expovariate(rate)) < begin + seconds:
        if (wait := at - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(connections.ask(outcome))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        count += 1
    await asyncio.gather(*tasks)
    connections.close()
    return outcome, count


# ---- the table


def quantile(times: list[float], at: float) -> str:
    """Milliseconds, or a dash if there is none."""
    if not times:
        return "-"
    return f"{sorted(times)[min(len(times) - 1, int(at * len(times)))] * 1000:.0f}"


def row(model: str, factor: float, rate: float, seconds: float, outcome: Outcome, count: int, executed: int) -> str:
    refused = len(outcome.refused)
    cells = [
        model,
        f"{factor:g}x",
        f"{rate:.0f}",
        f"{len(outcome.good) / seconds:.1f}",
        f"{quantile(outcome.good, 0.5)} / {quantile(outcome.good, 0.99)}",
        f"{refused / count:.0%}",
        quantile(outcome.refused, 0.99),
        f"{outcome.hints}/{refused}" if refused else "-",
        f"{outcome.late / count:.0%}",
        str(executed - len(outcome.good)),
        str(outcome.failed + outcome.not_sent),
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = [
    "queue",
    "load",
    "arrivals/s",
    "goodput/s",
    "p50 / p99 of good, ms",
    "refused",
    "p99 of refusals, ms",
    "with Retry-After",
    "late",
    "wasted executions",
    "failed or not sent",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=10, help="length of each load")
    parser.add_argument("--execute-ms", type=int, default=20, help="time of an execution")
    parser.add_argument("--instances", type=int, default=2, help="executions at the same time")
    parser.add_argument("--queue", type=int, default=8, help="max_queue_size of the bounded queue")
    parser.add_argument("--limit", type=float, default=0.5, help="seconds that a client waits")
    parser.add_argument("--rates", default="0.5,1,2,4", help="loads as multiples of the sustainable rate")
    parser.add_argument("--seed", type=int, default=1, help="of the gaps between arrivals")
    options = parser.parse_args()
    factors = [float(text) for text in options.rates.split(",")]
    goodputs: dict[str, dict[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        lay(Path(folder), options)
        with Server("--log-info=false", repository=Path(folder)) as server:
            port = server.http_port
            warm = max(1.0, min(3.0, options.seconds))
            base = asyncio.run(sustainable(port, "bounded", options.instances + 1, warm))
            print(f"Sustainable: {base:.1f}/s ({options.instances} instances of {options.execute_ms} ms; the queue holds", end=" ")
            print(f"{options.queue} requests where it is bounded; clients wait {options.limit * 1000:.0f} ms).\n")
            print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
            for model in ("bounded", "unbounded"):
                for factor in factors:
                    before = executions(server, model)
                    rate = base * factor
                    loop = open_loop(port, model, rate, options.seconds, options.limit, options.seed)
                    outcome, count = asyncio.run(loop)
                    executed = executions(server, model) - before
                    goodputs.setdefault(model, {})[factor] = len(outcome.good) / options.seconds
                    print(row(model, factor, rate, options.seconds, outcome, max(count, 1), executed), flush=True)
    peak = max(goodputs["bounded"].values())
    worst = {factor: goodput / peak for factor, goodput in goodputs["bounded"].items() if factor > 1}
    if worst and peak:
        shares = ", ".join(f"{share:.0%} at {factor:g}x" for factor, share in worst.items())
        print(f"\nGoodput of the bounded queue under overload, as a share of its peak: {shares}.")


if __name__ == "__main__":
    main()
