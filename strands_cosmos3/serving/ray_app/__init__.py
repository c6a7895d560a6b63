"""The served policy as an application of Ray Serve: ``serve --ray``, or
``strands_cosmos3.serving.ray_app:build`` in a Ray Serve config file (docs/fleet.md).

::

    settings.py  what a fleet serves, and its limits
    replica.py   a replica of the policy: the deployment that infers
    remote.py    requests that replicas answer, and what becomes of those that are lost
    asgi.py      the server's front as an ASGI application
    ingress.py   the deployment that holds the sockets
    app.py       both deployments, built and run

A socket is one request to Ray Serve, for as long as it is open. The ingress therefore holds the
sockets, and a replica is asked once for each inference, so that idle robots take no slot of
inference, and what a policy's replicas do (start, die, be replaced by those of another checkpoint)
ends no socket.
"""

from strands_cosmos3.serving.ray_app.app import build
from strands_cosmos3.serving.ray_app.settings import FleetSettings

__all__ = ["FleetSettings", "build"]
