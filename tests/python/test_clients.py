"""Every way the official client has of asking, against one model."""

import asyncio
import queue
import threading

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

A = np.array([[1, 2, 3, 4]], np.float32)
B = np.array([[0.5, 0.25, -1, 4]], np.float32)


def inputs(module, a: np.ndarray = A, b: np.ndarray = B, **arguments) -> list:
    made = []
    for name, array in (("A", a), ("B", b)):
        one = module.InferInput(name, list(array.shape), "FP32")
        one.set_data_from_numpy(array, **arguments)
        made.append(one)
    return made


def check(result, a: np.ndarray = A, b: np.ndarray = B) -> None:
    np.testing.assert_array_equal(result.as_numpy("SUM"), a + b)
    np.testing.assert_array_equal(result.as_numpy("DIFF"), a - b)


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_http(server, binary_in, binary_out):
    with http.InferenceServerClient(server.http) as client:
        wanted = [http.InferRequestedOutput(name, binary_data=binary_out) for name in ("SUM", "DIFF")]
        check(client.infer("addsub", inputs(http, binary_data=binary_in), outputs=wanted))


def test_http_all_outputs_when_none_is_named(server):
    with http.InferenceServerClient(server.http) as client:
        check(client.infer("addsub", inputs(http)))


def test_http_mixed_binary_and_json(server):
    one, two = inputs(http, binary_data=True)[0], inputs(http, binary_data=False)[1]
    wanted = [http.InferRequestedOutput("SUM", binary_data=False), http.InferRequestedOutput("DIFF", binary_data=True)]
    with http.InferenceServerClient(server.http) as client:
        check(client.infer("addsub", [one, two], outputs=wanted))


def test_http_async_infer(server):
    with http.InferenceServerClient(server.http, concurrency=8) as client:
        handles = [client.async_infer("addsub", inputs(http, A + i, B)) for i in range(32)]
        for i, handle in enumerate(handles):
            check(handle.get_result(), A + i, B)


def test_http_aio(server):
    async def main():
        async with http_aio.InferenceServerClient(server.http) as client:
            assert await client.is_server_live()
            results = await asyncio.gather(*(client.infer("addsub", inputs(http_aio, A + i, B)) for i in range(32)))
            for i, result in enumerate(results):
                check(result, A + i, B)

    asyncio.run(main())


def test_grpc(server):
    with grpc.InferenceServerClient(server.grpc) as client:
        check(client.infer("addsub", inputs(grpc)))


def test_grpc_async_callback(server):
    results: queue.Queue = queue.Queue()
    with grpc.InferenceServerClient(server.grpc) as client:
        for i in range(32):
            client.async_infer(
                "addsub",
                inputs(grpc, A + i, B),
                callback=lambda result, error: results.put((result, error)),
                request_id=str(i),
            )
        for _ in range(32):
            result, error = results.get(timeout=20)
            assert error is None
            check(result, A + int(result.get_response().id), B)


def test_grpc_async_error_reaches_the_callback(server):
    answered = threading.Event()
    seen = []

    def callback(result, error):
        seen.append((result, error))
        answered.set()

    with grpc.InferenceServerClient(server.grpc) as client:
        client.async_infer("no_such_model", inputs(grpc), callback=callback)
        assert answered.wait(20)
    result, error = seen[0]
    assert result is None and isinstance(error, InferenceServerException)
    assert "no_such_model" in error.message() and error.status() == "StatusCode.NOT_FOUND"


def test_grpc_stream(server):
    results: queue.Queue = queue.Queue()
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        for i in range(16):
            client.async_stream_infer("addsub", inputs(grpc, A + i, B), request_id=str(i))
        got = [results.get(timeout=20) for _ in range(16)]
        client.stop_stream()
    assert [error for _, error in got if error] == []
    for result, _ in got:
        check(result, A + int(result.get_response().id), B)
    assert sorted(int(result.get_response().id) for result, _ in got) == list(range(16))


def test_grpc_stream_with_empty_final_response(server):
    results: queue.Queue = queue.Queue()
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer("addsub", inputs(grpc), request_id="1", enable_empty_final_response=True)
        result, error = results.get(timeout=20)
        client.stop_stream()
    assert error is None
    check(result)
    # A model that answers exactly once marks that answer as the last; no empty one follows.
    assert result.get_response().parameters["triton_final_response"].bool_param
    assert results.empty()


def test_grpc_aio(server):
    async def main():
        async with grpc_aio.InferenceServerClient(server.grpc) as client:
            assert await client.is_model_ready("addsub")
            results = await asyncio.gather(*(client.infer("addsub", inputs(grpc_aio, A + i, B)) for i in range(32)))
            for i, result in enumerate(results):
                check(result, A + i, B)

    asyncio.run(main())


def test_grpc_aio_stream(server):
    async def requests():
        for i in range(8):
            yield {"model_name": "addsub", "inputs": inputs(grpc_aio, A + i, B), "request_id": str(i)}

    async def main():
        async with grpc_aio.InferenceServerClient(server.grpc) as client:
            seen = 0
            async for result, error in client.stream_infer(requests()):
                assert error is None
                check(result, A + int(result.get_response().id), B)
                seen += 1
            assert seen == 8

    asyncio.run(main())


def test_futures_settled_from_the_clients_thread(server):
    """The wrapper in wide use: a future of the loop, settled by `call_soon_threadsafe` from the callback."""

    async def ask(client, i: int):
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def settle(result, error):
            if not future.done():
                future.set_exception(error) if error else future.set_result(result)

        client.async_infer(
            "addsub", inputs(grpc, A + i, B), callback=lambda result, error: loop.call_soon_threadsafe(settle, result, error)
        )
        return await asyncio.wait_for(future, 20)

    async def main():
        with grpc.InferenceServerClient(server.grpc) as client:
            for i, result in enumerate(await asyncio.gather(*(ask(client, i) for i in range(32)))):
                check(result, A + i, B)

    asyncio.run(main())


@pytest.mark.parametrize("request_encoding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("response_encoding", [None, "gzip", "deflate"])
def test_http_compression_both_ways(server, request_encoding, response_encoding):
    with http.InferenceServerClient(server.http) as client:
        result = client.infer(
            "addsub",
            inputs(http),
            request_compression_algorithm=request_encoding,
            response_compression_algorithm=response_encoding,
        )
        check(result)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_grpc_compression(server, algorithm):
    with grpc.InferenceServerClient(server.grpc) as client:
        check(client.infer("addsub", inputs(grpc), compression_algorithm=algorithm))


@pytest.mark.parametrize("module", [http, grpc], ids=["http", "grpc"])
def test_requested_outputs_in_their_order(server, module):
    address = server.http if module is http else server.grpc
    with module.InferenceServerClient(address) as client:
        wanted = [module.InferRequestedOutput("DIFF")]
        result = client.infer("addsub", inputs(module), outputs=wanted)
        assert result.as_numpy("SUM") is None
        np.testing.assert_array_equal(result.as_numpy("DIFF"), A - B)


@pytest.mark.parametrize("module", [http, grpc], ids=["http", "grpc"])
def test_request_id_and_parameters(server, module):
    address = server.http if module is http else server.grpc
    with module.InferenceServerClient(address) as client:
        parameters = {"customer": "a", "retries": 3, "urgent": True}
        result = client.infer("addsub", inputs(module), request_id="trip-7", parameters=parameters)
        check(result)
        response = result.get_response()
        assert (response["id"] if module is http else response.id) == "trip-7"


@pytest.mark.parametrize("module", [http, grpc], ids=["http", "grpc"])
def test_headers_and_query_parameters_are_taken(server, module):
    address = server.http if module is http else server.grpc
    with module.InferenceServerClient(address) as client:
        check(client.infer("addsub", inputs(module), headers={"x-request-source": "test"}))
        if module is http:
            assert client.is_server_live(query_params={"probe": 1})


@pytest.mark.parametrize("module", [http, grpc], ids=["http", "grpc"])
def test_an_error_carries_the_servers_message(server, module):
    address = server.http if module is http else server.grpc
    with module.InferenceServerClient(address) as client:
        with pytest.raises(InferenceServerException, match="(?i)unknown model.*no_such_model"):
            client.infer("no_such_model", inputs(module))
        with pytest.raises(InferenceServerException, match="expected 2 inputs but got 1"):
            client.infer("addsub", inputs(module)[:1])


def test_http_connection_is_reused(server):
    with http.InferenceServerClient(server.http, concurrency=1) as client:
        for _ in range(200):
            check(client.infer("addsub", inputs(http)))


def test_grpc_client_timeout(server):
    array = np.ones(1, np.float32)
    tensor = grpc.InferInput("INPUT0", [1], "FP32")
    tensor.set_data_from_numpy(array)
    with grpc.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            client.infer("sleepy", [tensor], client_timeout=0.1)
        np.testing.assert_array_equal(client.infer("sleepy", [tensor]).as_numpy("OUTPUT0"), array)


def test_plugin_adds_a_header(server):
    from tritonclient.http.auth import BasicAuth

    with http.InferenceServerClient(server.http) as client:
        client.register_plugin(BasicAuth("user", "word"))
        assert client.is_server_live()


def test_requests_made_and_answers_read_without_a_client(server):
    """generate_request_body and parse_response_body: for those who bring their own transport."""
    body, head = http.InferenceServerClient.generate_request_body(inputs(http))
    headers = {"Inference-Header-Content-Length": str(head)}
    import http.client as transport

    connection = transport.HTTPConnection(server.http)
    connection.request("POST", "/v2/models/addsub/infer", body, headers)
    response = connection.getresponse()
    answer = response.read()
    length = response.getheader("Inference-Header-Content-Length")
    connection.close()
    check(http.InferenceServerClient.parse_response_body(answer, header_length=int(length)))
