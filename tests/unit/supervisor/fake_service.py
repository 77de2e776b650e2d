"""A stand-in for a service: answers health checks, and misbehaves on demand.

Arguments: PORT [never-healthy | deaf | die-after SECONDS | exit STATUS]
"""

import sys
import threading
import time
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main(port: str, mode: str = "well", value: str = "0") -> int:
    print(f"fake service on {port}", file=sys.stderr, flush=True)
    if mode == "exit":
        print("cannot read the model", file=sys.stderr, flush=True)
        return int(value)
    if mode == "deaf":
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    serving = health_pb2.HealthCheckResponse.SERVING
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING if mode == "never-healthy" else serving)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    if mode == "die-after":
        time.sleep(float(value))
        return 7
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
