"""The gRPC interface of a compute node: the log and the functions, for programs in any language.

`indilog_v1.proto` defines the interface; `scripts/generate_grpc` generates `indilog_v1_pb2` from
it. `log_service` and `invoke_service` answer requests, and `status` turns errors into status codes.
`server` runs the server behind the port `[gateway] grpc_port`. docs/GRPC.md describes the interface
for callers.

Import this package only in a process that runs the gRPC server. gRPC starts threads, so a process
that has imported this package must not fork.
"""

from indilog_compute.gateway.rpc.server import GrpcServer

__all__ = ["GrpcServer"]
