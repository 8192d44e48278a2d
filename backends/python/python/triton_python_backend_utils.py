"""What a python model imports as `triton_python_backend_utils`: Triton's interface, served by trireme."""

import asyncio
import json
import struct

import numpy as np

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

# Numbers of the configuration's data types.
BYTES = 13
BF16 = 14
_NUMBERS = {
    "TYPE_BOOL": 1,
    "TYPE_UINT8": 2,
    "TYPE_UINT16": 3,
    "TYPE_UINT32": 4,
    "TYPE_UINT64": 5,
    "TYPE_INT8": 6,
    "TYPE_INT16": 7,
    "TYPE_INT32": 8,
    "TYPE_INT64": 9,
    "TYPE_FP16": 10,
    "TYPE_FP32": 11,
    "TYPE_FP64": 12,
    "TYPE_STRING": BYTES,
    "TYPE_BF16": BF16,
}
_NAMES = {number: name for name, number in _NUMBERS.items()}
_TYPES = {
    1: np.bool_,
    2: np.uint8,
    3: np.uint16,
    4: np.uint32,
    5: np.uint64,
    6: np.int8,
    7: np.int16,
    8: np.int32,
    9: np.int64,
    10: np.float16,
    11: np.float32,
    12: np.float64,
    13: np.object_,
}
# How elements lie in memory; BF16 as the upper halves of FP32 words.
_STORAGE = {number: np.dtype(kind).newbyteorder("<") for number, kind in _TYPES.items()}
_STORAGE[BF16] = np.dtype("<u2")
_OF_DTYPE = {np.dtype(kind): number for number, kind in _TYPES.items()}

# Set by the worker.
_worker = None
_model_dir = None


class TritonModelException(Exception):
    """Something that a model did is wrong, or not possible here."""


class TritonError(Exception):
    """An error as the answer to one request; may also be raised."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message, code=INTERNAL):
        super().__init__(message)
        if not isinstance(code, int) or not 0 <= code <= 7:
            raise TritonModelException(f"expected an error code of TritonError, got {code!r}")
        self._message = str(message)
        self._code = int(code)

    def code(self):
        return self._code

    def message(self):
        return self._message


class Tensor:
    """A named tensor. Numpy arrays of received tensors refer to the request's memory; nothing is copied."""

    def __init__(self, name, array):
        if not isinstance(array, np.ndarray):
            raise TritonModelException(
                f"Tensor '{name}': expected a numpy array, got {type(array).__name__}; other arrays come in by from_dlpack"
            )
        self._name = str(name)
        self._data_type = _number_of(array.dtype, self._name)
        self._array = array

    @classmethod
    def _made(cls, name, data_type, array):
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._data_type = data_type
        tensor._array = array
        return tensor

    def name(self):
        return self._name

    def as_numpy(self):
        if self._data_type == BF16:
            raise TritonModelException(
                f"Tensor '{self._name}' is of type TYPE_BF16, which numpy does not have; take it by to_dlpack or __dlpack__"
            )
        return self._array

    def triton_dtype(self):
        return self._data_type

    def shape(self):
        return self._array.shape

    def is_cpu(self):
        return True

    def __dlpack__(self, **arguments):
        if self._data_type == BYTES:
            raise TritonModelException("DLPack does not support String type.")
        if self._data_type == BF16:
            return _bf16_to_torch(self._array).__dlpack__()
        arguments.pop("stream", None)
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return (1, 0)

    def to_dlpack(self):
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name, source):
        """A tensor from a DLPack capsule or from anything that has `__dlpack__`."""
        kind = type(source).__name__
        if not hasattr(source, "__dlpack__") and kind != "PyCapsule":
            raise TritonModelException("Object does not have '__dlpack__' attribute.")
        if kind == "PyCapsule":
            source = _Capsule(source)
        elif source.__dlpack_device__()[0] not in (1, 3):
            raise TritonModelException(
                f"Tensor '{name}' is not in host memory; this server takes tensors of the CPU, move it there first"
            )
        if str(getattr(source, "dtype", "")) == "torch.bfloat16":
            import torch

            return Tensor._made(str(name), BF16, source.contiguous().view(torch.int16).numpy().view(np.uint16))
        return Tensor(name, np.from_dlpack(source))

    def _content(self):
        """An array in row-major order and little-endian, or the encoded strings."""
        array = self._array
        if self._data_type == BYTES:
            return _write_strings(array)
        storage = _STORAGE[self._data_type]
        if array.dtype != storage:
            array = array.astype(storage)
        return array


class _Capsule:
    """A DLPack capsule in the form that numpy reads."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_arguments):
        return self.capsule

    def __dlpack_device__(self):
        return (1, 0)


def _bf16_to_torch(array):
    try:
        import torch
    except ImportError:
        raise TritonModelException(
            "a TYPE_BF16 tensor leaves by DLPack through torch, which is not installed for this interpreter"
        ) from None
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _number_of(dtype, name):
    number = _OF_DTYPE.get(dtype)
    if number is None and dtype.kind in "biuf":
        number = _OF_DTYPE.get(dtype.newbyteorder("="))
    if number is None and dtype.kind in "SU":
        number = BYTES
    if number is None:
        raise TritonModelException(f"Tensor '{name}': no data type of Triton holds numpy's '{dtype}'")
    return number


def _encoded(value):
    if isinstance(value, bytes):
        return value
    if isinstance(value, (bytearray, memoryview, np.bytes_)):
        return bytes(value)
    return str(value).encode()


def _write_strings(array):
    parts = []
    for value in array.ravel():
        text = _encoded(value)
        parts.append(struct.pack("<I", len(text)))
        parts.append(text)
    return b"".join(parts)


def _read_strings(source, shape):
    values = []
    place, end = 0, len(source)
    while place + 4 <= end:
        (length,) = struct.unpack_from("<I", source, place)
        place += 4
        values.append(bytes(source[place : place + length]))
        place += length
    array = np.empty(len(values), dtype=np.object_)
    array[:] = values
    return array.reshape(shape)


def serialize_byte_tensor(input_tensor):
    """Strings of a numpy array in the form that travels; None for an array that holds none."""
    if input_tensor.size == 0:
        return b""
    if input_tensor.dtype == np.object_ or input_tensor.dtype.type == np.bytes_:
        return _write_strings(input_tensor)
    return None


def deserialize_bytes_tensor(encoded_tensor):
    """The reverse of serialize_byte_tensor, in one dimension."""
    source = memoryview(encoded_tensor)
    values = _read_strings(source, (-1,)) if len(source) else np.empty(0, dtype=np.object_)
    return values


def triton_to_numpy_type(data_type):
    if isinstance(data_type, str):
        return triton_string_to_numpy(data_type)
    return _TYPES.get(data_type)


def numpy_to_triton_type(data_type):
    try:
        return _number_of(np.dtype(data_type), "")
    except TritonModelException:
        return None


def triton_string_to_numpy(triton_type_string):
    return _TYPES.get(_NUMBERS.get(triton_type_string))


# ---- requests and responses


def _check_parameters(parameters):
    if parameters is None:
        return {}
    if isinstance(parameters, str):
        parameters = json.loads(parameters) if parameters else {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"expected parameters as a dict, got {type(parameters).__name__}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}."
            )
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}."
            )
    return parameters


class PreferredMemory:
    """Where outputs of a call should be; this server has host memory."""

    def __init__(self, preferred_memory_type, preferred_device_id=0):
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace that a request belongs to."""

    def __init__(self, context=None):
        self._context = context

    def get_context(self):
        return self._context


class InferenceRequest:
    """A request: one that the model received, or one that it makes for another model."""

    def __init__(
        self,
        request_id="",
        correlation_id=0,
        inputs=None,
        requested_output_names=None,
        model_name="",
        model_version=-1,
        flags=0,
        timeout=0,
        preferred_memory=None,
        trace=None,
        parameters=None,
    ):
        self._id = request_id
        self._correlation_id = correlation_id
        self._inputs = list(inputs or [])
        self._outputs = list(requested_output_names or [])
        self._model_name = model_name
        self._model_version = model_version
        self._flags = flags
        self._timeout = timeout
        self._trace = trace or InferenceTrace()
        self._parameters = _check_parameters(parameters)
        self._key = None
        self._worker = _worker
        self._sender = None
        self._is_rescheduled = False

    @classmethod
    def _received(cls, entry, inputs, worker):
        request = cls.__new__(cls)
        request._id = entry.get("id", "")
        request._correlation_id = entry.get("c", 0)
        request._inputs = inputs
        request._outputs = entry["o"]
        request._model_name = ""
        request._model_version = -1
        request._flags = entry.get("f", 0)
        request._timeout = entry.get("t", 0)
        request._trace = None
        request._parameters = entry.get("p", {})
        request._key = entry["k"]
        request._worker = worker
        request._sender = None
        request._is_rescheduled = False
        return request

    def inputs(self):
        return self._inputs

    def request_id(self):
        return self._id

    def correlation_id(self):
        return self._correlation_id

    def flags(self):
        return self._flags

    def set_flags(self, flags):
        self._flags = flags

    def timeout(self):
        return self._timeout

    def parameters(self):
        """The parameters as JSON text."""
        return json.dumps(self._parameters)

    def requested_output_names(self):
        return self._outputs

    def model_name(self):
        return self._model_name

    def trace(self):
        if self._trace is None:
            self._trace = InferenceTrace()
        return self._trace

    def _require_received(self, what):
        if self._key is None:
            raise TritonModelException(f"{what} is for requests that execute was given")

    def get_response_sender(self):
        self._require_received("get_response_sender")
        if self._sender is None:
            self._sender = InferenceResponseSender(self._worker, self._key)
        return self._sender

    def is_cancelled(self):
        self._require_received("is_cancelled")
        return self._worker.is_cancelled(self._key)

    def set_release_flags(self, flags):
        self._require_received("set_release_flags")
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(
                "expected TRITONSERVER_REQUEST_RELEASE_ALL or TRITONSERVER_REQUEST_RELEASE_RESCHEDULE as release flags, got "
                f"{flags!r}"
            )
        reschedule = flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
        if reschedule and self._worker.is_decoupled:
            raise TritonModelException(
                "rescheduling a request of a decoupled model is not available yet in this version of trireme"
            )
        self._is_rescheduled = reschedule

    def exec(self, decoupled=False):
        """Lets the other model run and gives its response, or an iterator of them if `decoupled`."""
        number = self._begin_call()
        if decoupled:
            return ResponseIterator(_worker, number)
        response, is_last = _worker.next_response(number)
        if not is_last:
            while not is_last:
                _, is_last = _worker.next_response(number)
            raise TritonModelException(
                f"Model '{self._model_name}' is using the decoupled. The current BLS request call doesn't support models "
                "using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                "'async_exec' calls for decoupled models.'"
            )
        if response is None:
            return InferenceResponse([])
        return response

    async def async_exec(self, decoupled=False):
        """As exec, for coroutines: others run while this one waits."""
        if decoupled:
            return ResponseIterator(_worker, self._begin_call())
        return await asyncio.get_running_loop().run_in_executor(None, self.exec)

    def _begin_call(self):
        if _worker is None or not self._model_name:
            raise TritonModelException("expected a model_name in the request, got none")
        if not self._outputs:
            raise TritonModelException("expected requested_output_names in the request, got none")
        for tensor in self._inputs:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"expected tensors as inputs, got {type(tensor).__name__}")
        return _worker.begin_call(self)


class ResponseIterator:
    """Responses of another model, as they come."""

    def __init__(self, worker, number):
        self._worker = worker
        self._number = number
        self._is_over = False

    def __iter__(self):
        return self

    def __next__(self):
        if self._is_over:
            raise StopIteration
        response, self._is_over = self._worker.next_response(self._number)
        if response is None:
            if self._is_over:
                raise StopIteration
            return InferenceResponse([])
        return response

    def cancel(self):
        raise TritonModelException("cancelling a call is not available yet in this version of trireme")


_NO_LOADING = "loading and unloading models from a python model is not available yet in this version of trireme"


class InferenceResponse:
    def __init__(self, output_tensors=None, error=None, parameters=None):
        self._outputs = list(output_tensors or [])
        for tensor in self._outputs:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"expected tensors in output_tensors, got {type(tensor).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TritonModelException(f"expected a TritonError as error, got {type(error).__name__}")
        self._error = error
        self._parameters = _check_parameters(parameters)

    def output_tensors(self):
        return self._outputs

    def has_error(self):
        return self._error is not None

    def error(self):
        return self._error

    def parameters(self):
        """The parameters as JSON text."""
        return json.dumps(self._parameters)


class InferenceResponseSender:
    """Sends the responses of one request, from any thread, until the final flag."""

    def __init__(self, worker, key):
        self._worker = worker
        self._key = key
        self._is_closed = False
        self._count = 0

    def send(self, response=None, flags=0):
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(
                f"Unable to send response. Unsupported flag provided: {flags!r}"
            )
        if self._is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException(f"expected an InferenceResponse, got {type(response).__name__}")
        if not self._worker.is_decoupled and response is not None and self._count:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        self._worker.send_response(self._key, response, flags)
        self._count += response is not None
        self._is_closed = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL

    def is_cancelled(self):
        return self._worker.is_cancelled(self._key)


def get_input_tensor_by_name(inference_request, name):
    for tensor in inference_request._inputs:
        if tensor._name == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response, name):
    for tensor in inference_response._outputs:
        if tensor._name == name:
            return tensor
    return None


# ---- the model and its configuration


def get_model_dir():
    """Directory of the version that is served."""
    if _model_dir is None:
        raise TritonModelException("the model directory is known from initialize on")
    return _model_dir


def _config_by_name(config, key, name):
    for properties in config.get(key, []):
        if properties["name"] == name:
            return properties
    return None


def get_input_config_by_name(model_config, name):
    return _config_by_name(model_config, "input", name)


def get_output_config_by_name(model_config, name):
    return _config_by_name(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config):
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


class ModelConfig:
    """What auto_complete_config completes."""

    def __init__(self, model_config):
        self._model_config = json.loads(model_config) if isinstance(model_config, str) else model_config

    def as_dict(self):
        return self._model_config

    def set_max_batch_size(self, max_batch_size):
        current = self._model_config.get("max_batch_size", 0)
        if current > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {current}, but in auto-complete-config function for model "
                f"'{self._model_config['name']}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self):
        found = [key for key in ("sequence_batching", "ensemble_scheduling") if key in self._model_config]
        if found:
            raise ValueError(
                f"Configuration specified scheduling_choice as '{found[0]}', but auto-complete-config function for model "
                f"'{self._model_config['name']}' tries to set scheduling_choice as 'dynamic_batching'"
            )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict):
        unknown = [key for key in transaction_policy_dict if key != "decoupled"]
        if unknown:
            raise ValueError(
                "model transaction property in auto-complete-config function for model "
                f"'{self._model_config['name']}' contains property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        wanted = transaction_policy_dict.get("decoupled", False)
        if policy.get("decoupled", wanted) != wanted:
            raise ValueError(
                "trying to change decoupled property in auto-complete-config for model "
                f"'{self._model_config['name']}', which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = wanted

    def _add(self, key, properties, allowed):
        name = self._model_config.get("name", "")
        unknown = [each for each in properties if each not in allowed]
        if unknown:
            raise ValueError(
                f"{key} '{properties.get('name', '')}' in auto-complete-config function for model '{name}' contains "
                f"property other than {', '.join(allowed)}: {unknown[0]}"
            )
        for each in ("name", "data_type", "dims"):
            if each not in properties:
                raise ValueError(
                    f"{key} in auto-complete-config function for model '{name}' is missing '{each}' property."
                )
        for known in self._model_config.setdefault(key, []):
            if known["name"] != properties["name"]:
                continue
            for each, value in properties.items():
                present = known.get(each)
                if each == "dims":
                    present = [int(dim) for dim in present or []]
                    value = list(value)
                if present in (None, [], "TYPE_INVALID"):
                    known[each] = value
                elif each != "optional" and present != value:
                    raise ValueError(
                        f"unable to overwrite {each} {present} of {key} '{known['name']}' in auto-complete-config function "
                        f"for model '{name}' with {value}"
                    )
            return
        self._model_config[key].append(dict(properties))

    def add_input(self, input):
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output):
        self._add("output", output, ("name", "data_type", "dims"))


class Logger:
    """Writes into the server's log."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3

    @staticmethod
    def log(message, level=INFO):
        _worker.log(int(level), message)

    @staticmethod
    def log_info(message):
        _worker.log(Logger.INFO, message)

    @staticmethod
    def log_warn(message):
        _worker.log(Logger.WARNING, message)

    @staticmethod
    def log_error(message):
        _worker.log(Logger.ERROR, message)

    @staticmethod
    def log_verbose(message):
        _worker.log(Logger.VERBOSE, message)


class LogLevel:
    INFO = Logger.INFO
    WARNING = Logger.WARNING
    ERROR = Logger.ERROR
    VERBOSE = Logger.VERBOSE


class MetricFamily:
    """Custom metrics."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2

    def __init__(self, name, description, kind):
        raise TritonModelException(
            f"custom metrics ('{name}') are not available yet in this version of trireme; leave MetricFamily out"
        )


def load_model(model_name, config=None, files=None):
    raise TritonModelException(_NO_LOADING)


def unload_model(model_name, unload_dependents=False):
    raise TritonModelException(_NO_LOADING)


def is_model_ready(model_name, model_version=""):
    """Whether a model of the server serves; an empty version is the latest."""
    return _worker.is_model_ready(model_name, int(model_version) if str(model_version) else -1)
