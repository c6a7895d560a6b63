"""A real server process whose inference takes a while, sleeping or burning Python:
slow_server.py SECONDS sleep|spin|look.
"""

import sys
import time
from collections import deque
from dataclasses import replace

from helpers.serving import Echo
from strands_cosmos3.serving.served import ServedPolicy
from strands_cosmos3.serving.server import PolicyServer, ServerConfig

seconds, how = float(sys.argv[1]), sys.argv[2]
grace = float(sys.argv[3]) if len(sys.argv) > 3 else 30.0


def work(request):
    if request.instruction == "warm up":
        return
    if seconds:
        print("inferring", flush=True)
    end = time.monotonic() + seconds
    if how == "sleep":
        time.sleep(seconds)
    while time.monotonic() < end:
        sum(range(1000))


backend = Echo(work)
backend.info = replace(backend.info, requires_images=how == "look")
# a process that is watched for its memory must not collect pictures
backend.requests = deque(maxlen=1)
server = PolicyServer(ServedPolicy(backend, http="libero"), ServerConfig(port=0, grace_s=grace))
server.run(ready=lambda server: print(server.port, flush=True))
print("bye", flush=True)
