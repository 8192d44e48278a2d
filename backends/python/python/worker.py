"""The worker process of one instance of a python model.

It is started by the server, which sends this program over the socket that is the worker's standard input, and it
serves one model until the server closes that socket. It needs Python 3.8 or later with numpy, and nothing else.

A frame on the socket is a head of two little-endian 32-bit numbers (bytes of the JSON text, bytes of the data), the
JSON text, and the data. File descriptors of shared regions travel with the frame that names them first.
"""

import array
import asyncio
import ctypes
import fcntl
import importlib.util
import inspect
import json
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import traceback
import weakref

import numpy as np
import triton_python_backend_utils as pb_utils

HEAD = struct.Struct("<II")
# Tensors of a frame that are smaller together travel in the frame, larger ones in a region.
INLINE_LIMIT = 32 * 1024
ALIGNMENT = 64
PAGE = 64 * 1024
# Regions without a user that are kept for the next output.
SPARE_REGIONS = 4
SPARE_BYTES = 64 * 1024 * 1024
F_ADD_SEALS, SEAL_SEAL, SEAL_SHRINK = 1033, 1, 2


def aligned(size):
    return -(-size // ALIGNMENT) * ALIGNMENT


class Incoming:
    """Regions that the server made and writes inputs to."""

    def __init__(self):
        self.maps = {}
        self.released = []
        self.watched = {}

    def add(self, number, size, fd):
        try:
            self.maps[number] = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def drop(self, numbers):
        for number in numbers:
            region = self.maps.pop(number, None)
            if region is not None:
                try:
                    region.close()
                except BufferError:
                    pass  # an array still refers to it; it is unmapped with the last one

    def lease(self, number):
        """The region's bytes; when the last array on them is gone the server may write there again.

        It is no array itself: an array on an array refers to what lies under both, and would not keep it alive.
        """
        region = self.maps[number]
        lease = (ctypes.c_uint8 * len(region)).from_buffer(region)

        def gone(_reference, number=number):
            self.watched.pop(number, None)
            self.released.append(number)

        self.watched[number] = weakref.ref(lease, gone)
        return lease

    def take_released(self):
        released, self.released = self.released, []
        return released


class Outgoing:
    """Regions that the worker makes and writes outputs to; the server says when it has read them."""

    def __init__(self):
        self.lock = threading.Lock()
        self.next = 0
        self.maps = {}
        self.free = []

    def take(self, size):
        """A region of at least `size` bytes: its number, its map, and the descriptor if the server has not seen it."""
        with self.lock:
            fitting = [number for number in self.free if len(self.maps[number]) >= size]
            if fitting:
                number = min(fitting, key=lambda n: len(self.maps[n]))
                if len(self.maps[number]) <= 4 * max(size, PAGE):
                    self.free.remove(number)
                    return number, self.maps[number], None
            length = max(PAGE, 1 << (size - 1).bit_length())
            if size > 16 * 1024 * 1024:
                length = -(-size // PAGE) * PAGE
            fd = os.memfd_create("trireme-python", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, length)
            # Nothing may be cut off under the server's feet.
            fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK | SEAL_SEAL)
            self.next += 1
            self.maps[self.next] = mmap.mmap(fd, length)
            return self.next, self.maps[self.next], fd

    def give_back(self, numbers):
        """Frees regions and returns the numbers of those that are gone for good."""
        dropped = []
        with self.lock:
            self.free.extend(number for number in numbers if number in self.maps)
            while len(self.free) > 1 and (
                len(self.free) > SPARE_REGIONS or sum(len(self.maps[n]) for n in self.free) > SPARE_BYTES
            ):
                number = self.free.pop(0)
                self.maps.pop(number).close()
                dropped.append(number)
        return dropped


class Connection:
    """Frames to and from the server. Whichever thread waits for a frame reads for all others, too."""

    def __init__(self, sock):
        self.sock = sock
        self.buffer = bytearray()
        self.fds = []
        self.send_lock = threading.Lock()
        self.turn = threading.Condition()
        self.is_reading = False
        self.commands = []
        self.replies = {}
        self.next_call = 0
        self.incoming = Incoming()
        self.outgoing = Outgoing()
        self.dropped = []

    def fill(self):
        data, ancillary, _, _ = self.sock.recvmsg(262144, socket.CMSG_SPACE(16 * 4))
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self.fds.extend(fds)
        if not data:
            raise EOFError("the server is gone")
        self.buffer += data

    def receive(self):
        while len(self.buffer) < HEAD.size:
            self.fill()
        text, data = HEAD.unpack_from(self.buffer)
        end = HEAD.size + text + data
        while len(self.buffer) < end:
            self.fill()
        if len(self.buffer) == end:
            frame, self.buffer = self.buffer, bytearray()
        else:
            frame, self.buffer = self.buffer[:end], self.buffer[end:]
        message = json.loads(frame[HEAD.size : HEAD.size + text])
        if "region" in message:
            number, size = message["region"]
            self.incoming.add(number, size, self.fds.pop(0))
        if "gone" in message:
            self.incoming.drop(message["gone"])
        if "free" in message:
            self.dropped.extend(self.outgoing.give_back(message["free"]))
        return message, frame, HEAD.size + text

    def send(self, message, data=(), fd=None):
        released = self.incoming.take_released() if self.incoming.released else None
        if released:
            message["free"] = released
        if self.dropped:
            message["gone"], self.dropped = self.dropped, []
        text = json.dumps(message).encode()
        parts = [HEAD.pack(len(text), sum(map(len, data))), text, *data]
        frame = b"".join(parts)
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        with self.send_lock:
            sent = self.sock.sendmsg([frame], ancillary) if ancillary else self.sock.send(frame)
            if sent < len(frame):
                self.sock.sendall(memoryview(frame)[sent:])

    def wait(self, found):
        """Waits until `found()` gives something, and returns that."""
        while True:
            with self.turn:
                result = found()
                while result is None and self.is_reading:
                    self.turn.wait()
                    result = found()
                if result is not None:
                    return result
                self.is_reading = True
            try:
                received = self.receive()
            except BaseException:
                with self.turn:
                    self.is_reading = False
                    self.turn.notify_all()
                raise
            with self.turn:
                self.is_reading = False
                number = received[0].get("reply")
                if number is None:
                    self.commands.append(received)
                else:
                    self.replies.setdefault(number, []).append(received)
                self.turn.notify_all()

    def command(self):
        return self.wait(lambda: self.commands.pop(0) if self.commands else None)

    def call(self, message, data=(), fd=None):
        """Asks the server something and waits for its reply."""
        number = self.number()
        message["call"] = number
        self.send(message, data, fd)
        return self.reply(number)

    def number(self):
        with self.turn:
            self.next_call += 1
            return self.next_call

    def reply(self, number):
        """The next reply to a call."""

        def found():
            replies = self.replies.get(number)
            if not replies:
                return None
            reply = replies.pop(0)
            if not replies:
                del self.replies[number]
            return reply

        return self.wait(found)


# ---- tensors


def read_tensors(connection, tensors, message, frame, start, lease):
    """Tensors of one request or response; `lease` is the region that they lie in, None if they lie in the frame."""
    result = []
    for name, data_type, shape, offset, size in tensors:
        if data_type == pb_utils.BYTES:
            source = memoryview(frame)[start + offset :] if lease is None else memoryview(np.frombuffer(lease, np.uint8))[offset:]
            values = pb_utils._read_strings(source[:size], shape)
        else:
            kind = pb_utils._STORAGE[data_type]
            if lease is None:
                values = np.ndarray(shape, kind, frame, start + offset)
            else:
                values = np.ndarray(shape, kind, lease, offset)
        result.append(pb_utils.Tensor._made(name, data_type, values))
    return result


class Writer:
    """Collects the tensors of a message and places them in the frame or in a region."""

    def __init__(self):
        self.entries = []
        self.size = 0

    def add(self, tensor):
        content = tensor._content()
        size = content.nbytes if isinstance(content, np.ndarray) else len(content)
        entry = [tensor.name(), tensor._data_type, list(tensor.shape()), self.size, size]
        self.entries.append((entry, content))
        self.size += aligned(size)
        return entry

    def send(self, connection, message):
        fd = None
        data = []
        if self.size > INLINE_LIMIT:
            number, region, fd = connection.outgoing.take(self.size)
            message["region"] = [number, len(region), fd is not None]
            view = memoryview(region)
            for (_, _, _, offset, size), content in self.entries:
                if isinstance(content, np.ndarray):
                    target = np.ndarray(content.shape, content.dtype, region, offset)
                    np.copyto(target, content)
                else:
                    view[offset : offset + size] = content
        else:
            for (_, _, _, _, size), content in self.entries:
                content = content.tobytes() if isinstance(content, np.ndarray) else content
                data.append(content)
                padding = aligned(size) - size
                if padding:
                    data.append(bytes(padding))
        try:
            connection.send(message, data, fd)
        finally:
            if fd is not None:
                os.close(fd)


def answer_of(response, writer):
    """One response as it travels."""
    answer = {}
    if response._error is not None:
        answer["e"] = [response._error.code(), response._error.message()]
    else:
        answer["o"] = [writer.add(tensor) for tensor in response.output_tensors()]
    if response._parameters:
        answer["p"] = response._parameters
    return answer


# ---- the model


class Worker:
    def __init__(self, connection):
        self.connection = connection
        self.model = None
        self.cls = None
        self.loop = None
        self.is_decoupled = False

    # -- what pb_utils asks of the server

    def log(self, level, text):
        self.connection.send({"op": "log", "level": level, "text": str(text)})

    def send_response(self, key, response, flags):
        writer = Writer()
        message = {"op": "response", "r": key, "f": flags}
        if response is not None:
            message["a"] = [answer_of(response, writer)]
        writer.send(self.connection, message)

    def is_cancelled(self, key):
        message, _, _ = self.connection.call({"op": "cancelled", "r": key})
        return message["value"]

    def begin_call(self, request):
        """Sends a request for another model and returns the number that its replies come under."""
        number = self.connection.number()
        writer = Writer()
        asked = {
            "model": request._model_name,
            "version": request._model_version,
            "id": request._id,
            "c": request._correlation_id,
            "f": request._flags,
            "t": request._timeout,
            "p": request._parameters,
            "o": request._outputs,
            "i": [writer.add(tensor) for tensor in request._inputs],
        }
        writer.send(self.connection, {"op": "call", "call": number, "q": asked})
        return number

    def next_response(self, number):
        """The next response to a call, None at an end without one, and whether it is the last."""
        message, frame, start = self.connection.reply(number)
        response = None
        if "e" in message:
            code, text = message["e"]
            response = pb_utils.InferenceResponse([], pb_utils.TritonError(text, code))
        elif "o" in message:
            lease = self.connection.incoming.lease(message["in"]) if "in" in message else None
            tensors = read_tensors(self.connection, message["o"], message, frame, start, lease)
            response = pb_utils.InferenceResponse(tensors, parameters=message["p"])
        return response, message["last"]

    def is_model_ready(self, model, version):
        message, _, _ = self.connection.call({"op": "model_ready", "model": model, "version": version})
        return message["value"]

    # -- commands of the server

    def serve(self):
        while True:
            message, frame, start = self.connection.command()
            operation = message["op"]
            if operation == "execute":
                self.execute(message, frame, start)
            else:
                try:
                    result = getattr(self, operation)(message)
                    self.connection.send({"op": "done", "value": result})
                except BaseException as error:
                    self.connection.send({"op": "done", "error": describe(error)})
                if operation == "finalize":
                    return

    def open(self, message):
        """Imports model.py and completes the configuration, if the model wants to."""
        path = message["model_path"]
        sys.path.insert(0, os.path.dirname(path))
        if message["model_dir"] not in sys.path:
            sys.path.insert(1, message["model_dir"])
        spec = importlib.util.spec_from_file_location("model", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["model"] = module
        spec.loader.exec_module(module)
        cls = getattr(module, "TritonPythonModel", None)
        if cls is None:
            raise pb_utils.TritonModelException(f"expected a class 'TritonPythonModel' in '{path}', found none")
        execute = getattr(cls, "execute", None)
        if not callable(execute):
            raise pb_utils.TritonModelException(f"expected a method 'execute' of 'TritonPythonModel' in '{path}'")
        check_signature(cls, "execute", 1)
        check_signature(cls, "initialize", 1)
        self.cls = cls
        complete = getattr(cls, "auto_complete_config", None)
        if complete is None or not message["complete"]:
            return None
        config = pb_utils.ModelConfig(message["config"])
        completed = complete(config)
        if not isinstance(completed, pb_utils.ModelConfig):
            raise pb_utils.TritonModelException(
                "auto_complete_config must return the ModelConfig that it was given, it returned "
                f"{type(completed).__name__}"
            )
        return completed._model_config

    def initialize(self, message):
        self.is_decoupled = message["decoupled"]
        pb_utils._model_dir = message["version_dir"]
        self.model = self.cls()
        if hasattr(self.model, "initialize"):
            self.model.initialize(message["args"])

    def is_ready(self, message):
        check = getattr(self.model, "is_ready", None)
        if check is None:
            return True
        result = check()
        if inspect.isawaitable(result):
            result = self.run(result)
        if not isinstance(result, bool):
            raise pb_utils.TritonModelException(f"is_ready must return a bool, it returned {type(result).__name__}")
        return result

    def finalize(self, message):
        if hasattr(self.model, "finalize"):
            self.model.finalize()

    def run(self, awaitable):
        """Runs a coroutine to its end, on one event loop for the life of the worker."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            if self.is_decoupled:
                threading.Thread(target=self.loop.run_forever, daemon=True).start()
        if self.is_decoupled:
            return asyncio.run_coroutine_threadsafe(awaitable, self.loop).result()
        return self.loop.run_until_complete(awaitable)

    def execute(self, message, frame, start):
        lease = self.connection.incoming.lease(message["in"]) if "in" in message else None
        requests = []
        for entry in message["r"]:
            tensors = read_tensors(self.connection, entry["i"], message, frame, start, lease)
            requests.append(pb_utils.InferenceRequest._received(entry, tensors, self))
        del lease
        writer = Writer()
        reply = {"op": "done"}
        try:
            responses = self.model.execute(requests)
            if inspect.isawaitable(responses):
                if self.is_decoupled:
                    self.start(responses, [request._key for request in requests])
                    responses = None
                else:
                    responses = self.run(responses)
            reply["a"] = self.answers(requests, responses, writer)
        except Exception as error:
            writer = Writer()
            reply["error"] = describe(error)
            self.log(pb_utils.Logger.ERROR, reply["error"][1])
        del requests
        responses = None
        writer.send(self.connection, reply)

    def start(self, coroutine, keys):
        """Runs the coroutine of a decoupled model beside later executions."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, daemon=True).start()

        def ended(future):
            error = future.exception()
            if error is not None:
                code, text = describe(error)
                self.log(pb_utils.Logger.ERROR, text)
                for key in keys:
                    self.connection.send({"op": "response", "r": key, "f": 1, "a": [{"e": [code, text]}]})

        asyncio.run_coroutine_threadsafe(coroutine, self.loop).add_done_callback(ended)

    def answers(self, requests, responses, writer):
        if self.is_decoupled:
            if responses is not None:
                raise pb_utils.TritonModelException(
                    f"Python model is using the decoupled mode and the execute function must return None"
                )
            return [None] * len(requests)
        if responses is None:
            responses = [None] * len(requests)
        if not isinstance(responses, (list, tuple)):
            raise pb_utils.TritonModelException(
                f"Expected a list in the execute return, found type '{type(responses).__name__}'."
            )
        if len(responses) != len(requests):
            raise pb_utils.TritonModelException(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. InferenceRequest(s) "
                f"size is:{len(requests)}, and InferenceResponse(s) size is:{len(responses)}\n"
            )
        answers = []
        for request, response in zip(requests, responses):
            if request._is_rescheduled:
                if response is not None:
                    raise pb_utils.TritonModelException(
                        "a rescheduled request must have None in place of a response"
                    )
                answers.append({"s": True})
            elif response is None:
                if request._sender is None:
                    raise pb_utils.TritonModelException(
                        "Expected an 'InferenceResponse' object in the execute function return list, found None, and "
                        "no response sender was taken from the request"
                    )
                answers.append(None)
            elif not isinstance(response, pb_utils.InferenceResponse):
                raise pb_utils.TritonModelException(
                    "Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response).__name__}'."
                )
            else:
                answers.append(answer_of(response, writer))
        return answers


def check_signature(cls, name, arguments):
    method = getattr(cls, name, None)
    if method is None or not inspect.isfunction(method):
        return
    try:
        inspect.signature(method).bind(*[None] * (arguments + 1))
    except TypeError:
        raise pb_utils.TritonModelException(
            f"'{name}' of TritonPythonModel must take self and {arguments} argument, its signature is "
            f"{inspect.signature(method)}"
        ) from None


def describe(error):
    """Code and text of an exception, with its traceback from the model's code on."""
    if isinstance(error, pb_utils.TritonError):
        code = error.code()
    else:
        code = pb_utils.TritonError.INTERNAL
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next is not None:
        trace = trace.tb_next
    kind = f"{type(error).__name__}: {error}"
    if trace is None or trace.tb_frame.f_code.co_filename == __file__:
        return [code, str(error) or kind]
    text = "".join(traceback.format_tb(trace))
    return [code, f"{kind}\n\nAt:\n{text}".rstrip()]


def die_with_parent(parent):
    """A worker never outlives the server: the kernel ends it, and a thread sees to it where the kernel cannot."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(1, int(signal.SIGKILL), 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass
    if os.getppid() != parent:
        os._exit(1)


def watch(sock):
    import select

    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    # The main thread leaves by itself when it sees the end of the socket, unless a model keeps it.
    threading.Event().wait(10)
    os._exit(1)


def main(sock, parent):
    die_with_parent(parent)
    # An interrupt on the server's terminal is the server's matter.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, args=(sock,), daemon=True).start()
    worker = Worker(Connection(sock))
    pb_utils._worker = worker
    code = 0
    try:
        worker.serve()
    except EOFError:
        pass
    except OSError as error:
        if not isinstance(error, (BrokenPipeError, ConnectionResetError)):
            traceback.print_exc()
            code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the model must not keep the worker.
    os._exit(code)
