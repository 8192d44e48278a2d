"""Sends the recorded requests of the real Triton to our server and compares the answers.

Compared are the status, the content type, the content encoding and the body as a value, but for what RULES says.
`exchanges.jsonl` holds, in the order of the recording, what was sent to tritonserver 2.51.0 and what it
answered. An exchange that differs must stand in `differences.toml` with the reason; one that stands there and
no longer differs is an error too, so that the list stays true.

    .venv/bin/python tests/golden/replay.py [--show NAME] [--markdown] [--suggest]
"""

import argparse
import base64
import collections
import concurrent.futures
import fnmatch
import gzip
import http.client
import json
import re
import shutil
import socket
import struct
import sys
import tempfile
import time
import tomllib
import zlib
from pathlib import Path

import grpc
import numpy
from google.protobuf.json_format import MessageToDict, ParseDict
from tritonclient.grpc import service_pb2, service_pb2_grpc

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))
from server import Server  # noqa: E402

# What counts as the same although the bytes differ; printed into docs/compatibility.md.
RULES = [
    "Times, the server's version and the four parameters `param0` to `param3`, which Triton's sample identity backend "
    "puts into every answer, are left out.",
    "FP32 numbers in JSON are written with as many digits as tell them apart (`0.1`); Triton writes the digits of the "
    "double (`0.10000000149011612`). Both read back as the same FP32.",
    "Error answers are JSON and say so in `Content-Type`; Triton labels some of its JSON errors `text/plain`.",
    "An error message may go on after Triton's words, to say where and what to do.",
]
# Not compared, for they differ from run to run or from server to server.
# Memory too: Triton's ONNX Runtime backend tells of none.
VOLATILE = {"last_inference", "ns", "last_inference_ms", "version", "memory_usage"}
# Parameters that Triton's sample identity backend puts into every answer; ours does not.
SAMPLE_PARAMETERS = {"param0", "param1", "param2", "param3"}
# Sent at the same time, as they were when recorded.
TOGETHER = ("delay queue full", "delay timeout")
# Unloading answers before it is done; the recording waited as well.
SETTLE = {"unload": 0.5, "unload dependents": 0.5}
# Why the configuration of a model with another backend is not compared.
STAND_IN = "another backend stands in for the python backend, which is not built yet"
SHARED_MEMORY = Path("/dev/shm/tp_shm")


def unpack(value: str | dict | None) -> bytes | None:
    """Bytes as they stand in the recording: text, or base64 where they are not text."""
    if value is None:
        return None
    return base64.b64decode(value["b64"]) if isinstance(value, dict) else value.encode()


# ---- sending


class Client:
    """Sends recorded requests; each HTTP request over a connection of its own, as in the recording."""

    def __init__(self, server: Server) -> None:
        self.server = server
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self.channel = grpc.insecure_channel(server.grpc, options=unlimited)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def send(self, exchange: dict) -> dict:
        request = exchange["request"]
        match exchange["proto"]:
            case "http":
                return self.http(request)
            case "raw":
                return self.raw(unpack(request["bytes"]))
            case "grpc" if request["method"] == "ModelStreamInfer":
                return self.stream(request["messages"])
            case "grpc":
                return self.unary(exchange["name"], request)
            case other:
                raise ValueError(f"unknown protocol {other} in exchange {exchange['name']}")

    def http(self, request: dict) -> dict:
        connection = http.client.HTTPConnection(self.server.http, timeout=30)
        try:
            connection.request(request["method"], request["path"], unpack(request["body"]), request["headers"])
            response = connection.getresponse()
            return {"status": response.status, "headers": dict(response.getheaders()), "body": response.read()}
        except (OSError, http.client.HTTPException) as error:
            return {"exception": repr(error)}
        finally:
            connection.close()

    def raw(self, data: bytes) -> dict:
        received = b""
        with socket.create_connection(("127.0.0.1", self.server.http_port), timeout=5) as connection:
            try:
                connection.sendall(data)
                connection.settimeout(2)
                while part := connection.recv(65536):
                    received += part
                received += b"<EOF>"
            except OSError as error:
                received += f"<{type(error).__name__}>".encode()
        return {"bytes": received}

    def unary(self, name: str, request: dict) -> dict:
        method = request["method"]
        message = getattr(service_pb2, f"{method}Request").FromString(base64.b64decode(request["b64"]))
        try:
            answer = getattr(self.stub, method)(message, timeout=0.05 if name == "grpc deadline" else 30)
            return {"code": "OK", "message": MessageToDict(answer, preserving_proto_field_name=True)}
        except grpc.RpcError as error:
            return {"code": error.code().name, "details": error.details()}

    def stream(self, messages: list[dict]) -> dict:
        requests = [ParseDict(message, service_pb2.ModelInferRequest()) for message in messages]
        answers = []
        try:
            for answer in self.stub.ModelStreamInfer(iter(requests), timeout=30):
                answers.append(MessageToDict(answer, preserving_proto_field_name=True))
            return {"code": "OK", "details": "", "messages": answers}
        except grpc.RpcError as error:
            return {"code": error.code().name, "details": error.details(), "messages": answers}


def replay(server: Server, exchanges: list[dict]) -> list[dict]:
    """Sends all requests in order and returns the answers in the same order."""
    client = Client(server)
    answers = []
    waiting = collections.deque(exchanges)
    while waiting:
        group = [waiting.popleft()]
        prefix = next((p for p in TOGETHER if group[0]["name"].startswith(p)), None)
        while prefix and waiting and waiting[0]["name"].startswith(prefix):
            group.append(waiting.popleft())
        with concurrent.futures.ThreadPoolExecutor(len(group)) as pool:
            sent = []
            for exchange in group:
                sent.append(pool.submit(client.send, exchange))
                # In the recorded order, which decides who finds room.
                time.sleep(0.002)
            answers += [each.result() for each in sent]
        if not server.alive():
            names = ", ".join(exchange["name"] for exchange in group)
            sys.exit(f"the server ended with {server.process.returncode} at: {names}\n{server.log()}")
        time.sleep(SETTLE.get(group[-1]["name"], 0))
    return answers


# ---- comparing


def settled(value: object, unbuilt: set[str], top: bool = True) -> object:
    """A JSON value without what may differ: times, Triton's sample parameters, models of unbuilt backends."""
    if isinstance(value, list):
        kept = [entry for entry in value if not (isinstance(entry, dict) and entry.get("name") in unbuilt)]
        return [settled(entry, unbuilt, False) for entry in kept]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, entry in value.items():
        if key in VOLATILE and not (key == "version" and not top):
            continue
        if key == "parameters" and isinstance(entry, dict):
            entry = {name: each for name, each in entry.items() if name not in SAMPLE_PARAMETERS}
            if not entry:
                continue
        if key == "data" and value.get("datatype") == "FP32":
            # As text, for NaN is unequal to itself.
            entry = [str(numpy.float32(number)) for number in entry]
        result[key] = settled(entry, unbuilt, False)
    return result


def http_body(answer: dict, unbuilt: set[str]) -> object:
    """What an HTTP answer says: JSON as a value, beside it the bytes of binary tensors."""
    headers = {name.lower(): value for name, value in answer["headers"].items()}
    body = answer["body"] if isinstance(answer["body"], bytes) else unpack(answer["body"]) or b""
    match headers.get("content-encoding"):
        case "gzip":
            body = gzip.decompress(body)
        case "deflate":
            body = zlib.decompress(body)
    length = headers.get("inference-header-content-length")
    head, tail = (body[: int(length)], body[int(length) :]) if length else (body, b"")
    try:
        return [settled(json.loads(head.decode(errors="surrogateescape")), unbuilt), tail.hex()]
    except ValueError:
        return [head.decode(errors="replace"), tail.hex()]


def essence(proto: str, answer: dict, unbuilt: set[str]) -> dict:
    """The parts of an answer that are compared."""
    if "exception" in answer:
        return {"exception": answer["exception"]}
    match proto:
        case "http":
            headers = {name.lower(): value for name, value in answer["headers"].items()}
            return {
                "status": answer["status"],
                "content-type": headers.get("content-type"),
                "content-encoding": headers.get("content-encoding"),
                "body": http_body(answer, unbuilt),
            }
        case "grpc":
            body = settled(answer.get("message", answer.get("messages")), unbuilt)
            return {"status": answer.get("code"), "body": body, "details": answer.get("details") or None}
        case _:
            received = answer["bytes"] if isinstance(answer["bytes"], bytes) else unpack(answer["bytes"])
            statuses = re.findall(rb"HTTP/1\.[01] (\d{3})", received)
            return {"status": [int(status) for status in statuses]}


def error_text(answer: dict) -> str | None:
    """The message of an answer that is an error."""
    if answer.get("details"):
        return answer["details"]
    match answer.get("body"):
        case [{"error": str(text)}, ""]:
            return text
    return None


def equal(triton: dict, ours: dict) -> bool:
    """Whether two answers are the same by RULES."""
    texts = error_text(triton), error_text(ours)
    if None in texts or triton["status"] != ours["status"]:
        return triton == ours
    known, said = (text.rstrip().rstrip(".;") for text in texts)
    return said.startswith(known)


class Differences:
    """differences.toml: which exchanges may differ, and why."""

    def __init__(self, path: Path) -> None:
        content = tomllib.loads(path.read_text())
        self.unbuilt: dict[str, str] = content.get("unbuilt", {})
        self.stand_ins: dict[str, str] = content.get("stand_in", {})
        self.cases: list[tuple[str, str, str]] = []
        for kind in ("deliberate", "later"):
            for entry in content.get(kind, []):
                self.cases += [(name, kind, entry["reason"]) for name in entry["cases"]]

    def model_reason(self, exchange: dict) -> str | None:
        """The reason when the exchange asks a model whose backend is not built."""
        request = exchange["request"]
        if exchange["proto"] == "http":
            match = re.match(r"/v2/(?:repository/)?models/([^/]+)(.*)", request["path"])
            if match and not re.search("/(infer|ready)$", match[2]) and match[1] in self.stand_ins:
                return STAND_IN
            return self.unbuilt.get(match[1]) if match else None
        if exchange["proto"] != "grpc":
            return None
        if "messages" in request:
            return next((r for m in request["messages"] if (r := self.unbuilt.get(m.get("model_name", "")))), None)
        message = getattr(service_pb2, f"{request['method']}Request").FromString(base64.b64decode(request["b64"]))
        name = getattr(message, "model_name", "") or getattr(message, "name", "")
        if request["method"] != "ModelInfer" and name in self.stand_ins:
            return STAND_IN
        return self.unbuilt.get(name)

    def of(self, exchange: dict) -> tuple[str, str] | None:
        """Kind and reason of the entry for this exchange."""
        for pattern, kind, reason in self.cases:
            if pattern == exchange["name"] or fnmatch.fnmatchcase(exchange["name"], pattern):
                return kind, reason
        return None


def alike_together(exchanges: list[dict], answers: list[dict]) -> list[str]:
    """Of the requests sent at the same time, those groups in which as many as recorded had each status.

    Which of them is refused for a full queue depends on who comes first.
    """
    alike = []
    for prefix in TOGETHER:
        group = [(e["response"], a) for e, a in zip(exchanges, answers) if e["name"].startswith(prefix)]
        recorded, ours = zip(*group)
        if sorted(str(each.get("status")) for each in recorded) == sorted(str(each.get("status")) for each in ours):
            alike.append(prefix)
    return alike


def verdicts(exchanges: list[dict], answers: list[dict], differences: Differences) -> list[dict]:
    """One row an exchange: what was expected, what came, and whether that is in order."""
    unbuilt = set(differences.unbuilt)
    rows = []
    alike = alike_together(exchanges, answers)
    for exchange, answer in zip(exchanges, answers, strict=True):
        wanted = essence(exchange["proto"], exchange["response"], unbuilt)
        got = essence(exchange["proto"], answer, unbuilt)
        listed = differences.of(exchange)
        model = differences.model_reason(exchange)
        row = {"name": exchange["name"], "proto": exchange["proto"], "triton": wanted, "ours": got, "reason": ""}
        if model:
            row |= {"verdict": "later", "reason": model}
        elif equal(wanted, got) or any(exchange["name"].startswith(prefix) for prefix in alike):
            row["verdict"] = "stale" if listed else "same"
            row["reason"] = listed[1] if listed else ""
        elif listed:
            row |= {"verdict": listed[0], "reason": listed[1]}
        else:
            row["verdict"] = "unexpected"
        rows.append(row)
    return rows


# ---- printing


def short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 600 else text[:600] + " ..."


def differing_parts(row: dict) -> str:
    keys = [k for k in row["triton"].keys() | row["ours"].keys() if row["triton"].get(k) != row["ours"].get(k)]
    if error_text(row["triton"]) and error_text(row["ours"]):
        keys = [key for key in keys if key != "content-type"]
    lines = []
    for key in sorted(keys):
        lines.append(f"    {key}: triton {short(row['triton'].get(key))}\n    {'':{len(key)}}  ours   {short(row['ours'].get(key))}")
    return "\n".join(lines)


def markdown(rows: list[dict]) -> str:
    """The tables of docs/compatibility.md."""
    total = collections.Counter(row["verdict"] for row in rows)
    built = [row for row in rows if row["verdict"] != "later"]
    same = sum(row["verdict"] == "same" for row in built)
    lines = [
        f"{len(rows)} recorded exchanges: {total['same']} the same, {total['deliberate']} deliberately different, "
        f"{total['later']} that need a part not built yet. Of the {len(built)} that are built, "
        f"{100 * same / max(len(built), 1):.1f} % are the same.",
        "",
        "The same means:",
        "",
        *(f"- {rule}" for rule in RULES),
        "",
    ]
    for kind, title in (("deliberate", "Deliberate differences"), ("later", "Not built yet")):
        lines += [f"### {title}", "", "| Exchanges | Triton | Here | Why |", "|---|---|---|---|"]
        groups: dict[str, list[dict]] = {}
        for row in rows:
            if row["verdict"] == kind:
                groups.setdefault(row["reason"], []).append(row)
        for reason, members in groups.items():
            names = ", ".join(f"`{row['name']}`" for row in members)
            statuses = [sorted({str(row[side].get("status", "closed")) for row in members}) for side in ("triton", "ours")]
            lines.append(f"| {names} | {', '.join(statuses[0])} | {', '.join(statuses[1])} | {reason} |")
        lines.append("")
    return "\n".join(lines)


def suggest(rows: list[dict]) -> str:
    """Entries for the unexpected ones, to be given a reason by hand."""
    names = [row["name"] for row in rows if row["verdict"] == "unexpected"]
    listed = ",\n".join(f"  {json.dumps(name)}" for name in names)
    return f'[[deliberate]]\nreason = ""\ncases = [\n{listed},\n]'


def lay_models(into: Path, differences: Differences) -> list[str]:
    """Copies the models and returns those to load; git keeps no empty folder, hence the .gitkeep files."""
    unbuilt = differences.unbuilt
    shutil.copytree(HERE / "models", into, ignore=lambda _, names: [n for n in names if n == ".gitkeep" or n in unbuilt])
    for name, backend in differences.stand_ins.items():
        config = into / name / "config.pbtxt"
        text, count = re.subn(r'(?m)^backend: ".*"$', f'backend: "{backend}"', config.read_text())
        assert count == 1, f"{config} names no backend to replace"
        config.write_text(text)
    names = sorted(path.name for path in into.iterdir())
    return [name for name in names if not name.startswith("broken_") and name != "no_version"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", metavar="PATTERN", help="print request and both answers of these exchanges")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/compatibility.md")
    parser.add_argument("--suggest", action="store_true", help="print entries for the unexpected ones")
    arguments = parser.parse_args()

    exchanges = [json.loads(line) for line in (HERE / "exchanges.jsonl").read_text().splitlines()]
    differences = Differences(HERE / "differences.toml")
    with tempfile.TemporaryDirectory(prefix="trireme-golden-") as folder:
        repository = Path(folder) / "models"
        loaded = lay_models(repository, differences)
        flags = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in loaded)]
        flags += differences_flags(folder)
        SHARED_MEMORY.write_bytes(struct.pack("<16f", *(i / 2 for i in range(16))).ljust(4096, b"\0"))
        try:
            # The recording of gRPC began with a server of its own.
            first = next(i for i, exchange in enumerate(exchanges) if exchange["proto"] == "grpc")
            answers = []
            for part in (exchanges[:first], exchanges[first:]):
                with Server(*flags, repository=repository) as server:
                    answers += replay(server, part)
            rows = verdicts(exchanges, answers, differences)
        finally:
            SHARED_MEMORY.unlink(missing_ok=True)

    if arguments.show:
        for row, exchange in zip(rows, exchanges):
            if fnmatch.fnmatchcase(row["name"], arguments.show):
                print(f"[{row['verdict']}] {row['name']}\n  request {short(exchange['request'])}")
                print(f"  triton {short(row['triton'])}\n  ours   {short(row['ours'])}")
        return 0
    if arguments.markdown:
        print(markdown(rows))
        return 0
    if arguments.suggest:
        print(suggest(rows))
        return 0
    matched = {name for name, _, _ in differences.cases if any(fnmatch.fnmatchcase(r["name"], name) or r["name"] == name for r in rows)}
    unknown = sorted({name for name, _, _ in differences.cases} - matched)
    for row in rows:
        if row["verdict"] in ("unexpected", "stale"):
            print(f"[{row['verdict']}] {row['name']}  {row['reason']}\n{differing_parts(row)}")
    for name in unknown:
        print(f"[stale] differences.toml names {name!r}, which is no recorded exchange")
    counts = collections.Counter(row["verdict"] for row in rows)
    print("\n".join(f"{counts[verdict]:5} {verdict}" for verdict in ("same", "deliberate", "later", "stale", "unexpected")))
    failed = counts["unexpected"] + counts["stale"] + len(unknown)
    print(f"{len(rows) - counts['unexpected'] - counts['stale']} passed, {failed} failed")
    return 1 if failed else 0


def differences_flags(folder: str) -> list[str]:
    """Trace settings as in the recording; left out while tracing is refused by name."""
    content = tomllib.loads((HERE / "differences.toml").read_text())
    return [flag.replace("{folder}", folder) for flag in content.get("flags", [])]


if __name__ == "__main__":
    sys.exit(main())
