import os, socket, struct, sys, types, linecache
if sys.version_info < (3, 8):
    sys.exit("python models need Python 3.8 or later, this is " + sys.version)
sock = socket.socket(fileno=os.dup(0))
null = os.open(os.devnull, os.O_RDONLY)
os.dup2(null, 0)
os.close(null)
def take(size):
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            os._exit(1)
        data += part
    return data
def load(name):
    source = take(struct.unpack("<I", take(4))[0]).decode()
    file = "<trireme>/" + name + ".py"
    module = types.ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), module.__dict__)
    return module
sys.path = [p for p in sys.path if p]
load("triton_python_backend_utils")
load("trireme_worker").main(sock, int(sys.argv[1]))
