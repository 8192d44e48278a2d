"""Many requests at once from one coroutine world, in the two ways that are in use.

    .venv/bin/python examples/clients/many_asyncio.py [--http localhost:8000] [--grpc localhost:8001]

The first way is the client's own asyncio module. The second wraps its callback interface into futures: the
callback runs on a thread of the client, so the result must be handed to the event loop with
`call_soon_threadsafe`; setting it directly is a race.
"""

import argparse
import asyncio
from pathlib import Path

import numpy as np
import prepare
import tritonclient.grpc as grpc
import tritonclient.http.aio as http_aio

FILES = sorted((Path(__file__).resolve().parents[2]).rglob("examples/clients/*.py"))


def best(entries: np.ndarray) -> str:
    return entries.reshape(-1)[0].decode()


async def ask_http(client: http_aio.InferenceServerClient, path: Path) -> str:
    batch = prepare.file_bytes(path.read_bytes())[None]
    tensor = http_aio.InferInput("bytes", list(batch.shape), "INT32")
    tensor.set_data_from_numpy(batch)
    wanted = http_aio.InferRequestedOutput("target_label", class_count=1)
    answer = await client.infer("file_type", [tensor], outputs=[wanted])
    return best(answer.as_numpy("target_label"))


def ask_grpc(client: grpc.InferenceServerClient, path: Path) -> asyncio.Future:
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(result: grpc.InferResult | None, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(best(result.as_numpy("target_label")))

    batch = prepare.file_bytes(path.read_bytes())[None]
    tensor = grpc.InferInput("bytes", list(batch.shape), "INT32")
    tensor.set_data_from_numpy(batch)
    wanted = grpc.InferRequestedOutput("target_label", class_count=1)
    client.async_infer(
        "file_type",
        [tensor],
        callback=lambda result, error: loop.call_soon_threadsafe(settle, result, error),
        outputs=[wanted],
    )
    return future


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", default="localhost:8000")
    parser.add_argument("--grpc", default="localhost:8001")
    arguments = parser.parse_args()

    async with http_aio.InferenceServerClient(arguments.http) as client:
        answers = await asyncio.gather(*(ask_http(client, path) for path in FILES))
    for path, answer in zip(FILES, answers):
        print(f"http.aio        {path.name:20} {answer}")

    with grpc.InferenceServerClient(arguments.grpc) as client:
        answers = await asyncio.gather(*(ask_grpc(client, path) for path in FILES))
    for path, answer in zip(FILES, answers):
        print(f"grpc, futures   {path.name:20} {answer}")


if __name__ == "__main__":
    asyncio.run(main())
