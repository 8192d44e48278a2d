"""Requests written by hand, for what the official client never sends."""

import json
import re
import socket
import struct

from server import Server


def tensor(name: str, datatype: str, shape: list, data: object) -> dict:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def infer(server: Server, model: str, body: object, headers: dict | None = None) -> tuple[int, dict]:
    """Sends `body` (a value to write as JSON, or bytes as they are) and returns the status and the JSON answer."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer = server.request("POST", f"/v2/models/{model}/infer", payload, headers)
    return status, json.loads(answer) if answer else {}


def refused(server: Server, model: str, body: object, headers: dict | None = None, status: int = 400) -> str:
    """The message of a request that must be refused with `status`."""
    got, answer = infer(server, model, body, headers)
    assert got == status, (got, answer)
    assert answer.keys() == {"error"}, answer
    return answer["error"]


def values(answer: dict) -> list:
    """The data of the only output."""
    (output,) = answer["outputs"]
    return output["data"]


def split(head: dict, *tensors: bytes) -> tuple[bytes, dict]:
    """Body and headers of a request with binary tensors behind the JSON."""
    text = json.dumps(head).encode()
    return text + b"".join(tensors), {"Inference-Header-Content-Length": str(len(text))}


def binary(name: str, datatype: str, shape: list, size: int) -> dict:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


def strings(*elements: bytes) -> bytes:
    """BYTES elements, each behind its length."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def talk(server: Server, *parts: bytes, seconds: float = 5, finish: bool = False) -> bytes:
    """Writes bytes to the HTTP port and returns all that comes back until the server closes or is silent."""
    received = b""
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=seconds) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            if finish:
                connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                received += chunk
            received += b"<closed>"
        except TimeoutError:
            received += b"<silent>"
        except OSError:
            received += b"<reset>"
    return received


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3})", received)]
