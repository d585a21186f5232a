"""The gRPC interface of a compute node: the log and the functions, for programs in any language.

`indilog_v1.proto` defines it, and `scripts/generate_grpc` generates `indilog_v1_pb2`. `log_service`
and `invoke_service` answer requests, `status` turns errors into status codes, `server` runs the
server behind the port of `[gateway] grpc_port`. docs/GRPC.md describes it for callers.

Import this package only in a process that serves it: gRPC starts threads, so no process may be
forked from one that has imported it.
"""

from indilog_compute.gateway.rpc.server import GrpcServer

__all__ = ["GrpcServer"]
