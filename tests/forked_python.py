"""What `python`, `torchrun` and the like are in the folder that `processes.forking_environment` makes:
asks the fork server for the program, and stands for it in the shell that started it."""

import os
import pickle
import signal
import socket
import sys

address, programs = os.environ["MUSTER_TESTS_FORK_SERVER"], os.environ["MUSTER_TESTS_PROGRAMS"]
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
unbuffered = arguments[:1] == ["-u"]
if not name.startswith("python"):
    arguments = [os.path.join(programs, name), *arguments]
order = {
    "program": arguments[1:] if unbuffered else arguments,
    "env": dict(os.environ),
    "folder": os.getcwd(),
    "numbers": [0, 1, 2],
    "new_session": False,
    "unbuffered": unbuffered,
    "before": pickle.dumps(None),
}
content = pickle.dumps(order)
message = len(content).to_bytes(8, "little") + content
server = socket.socket(socket.AF_UNIX)
server.connect(address)
sent = socket.send_fds(server, [message], [0, 1, 2])
if sent < len(message):
    server.sendall(message[sent:])


def answer() -> int:
    content = server.recv(8)
    if not content:
        sys.exit("the fork server is gone")
    return int.from_bytes(content, "little")


pid = answer()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = os.waitstatus_to_exitcode(answer())
sys.exit(code if code >= 0 else 128 - code)
