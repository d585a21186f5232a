"""`indilog.v1.InvokeService`: calls of deployed functions.

Calls run on this compute node (`FunctionHost`). Unlike calls over HTTP, they are not forwarded to
other nodes. `GrpcServer` adds the handlers of `InvokeService`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeAlias

import grpc

from indilog.base.errors import InvalidArgumentsError
from indilog.link.link_messages import Failed, Returned, error_from
from indilog_compute.gateway.rpc import indilog_v1_pb2 as pb
from indilog_compute.gateway.rpc.status import answering
from indilog_compute.workers.host import FunctionHost

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
NAME: Final = "indilog.v1.InvokeService"


class InvokeService:
    """The handlers of the service.

    Args:
        host: runs the functions.
    """

    def __init__(self, host: FunctionHost) -> None:
        self._host = host

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers for the server."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Invoke": grpc.unary_unary_rpc_method_handler(
                self.invoke,
                request_deserializer=pb.InvokeRequest.FromString,
                response_serializer=pb.InvokeResponse.SerializeToString,
            ),
            "Send": grpc.unary_unary_rpc_method_handler(
                self.send,
                request_deserializer=pb.SendRequest.FromString,
                response_serializer=pb.SendResponse.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler(NAME, methods)

    async def invoke(self, request: pb.InvokeRequest, context: Context) -> pb.InvokeResponse:
        """Call a function and return its result. If the client leaves before a worker has taken
        the call, cancel the call.
        """
        async with answering(context):
            await self._check_position(request.position)
            arguments = request.arguments or b"{}"
            if request.idempotency_key:
                invocation, outcome = await self._host.call_once(
                    request.function,
                    arguments,
                    key=request.idempotency_key,
                    position=request.position,
                )
            else:
                call = self._host.call(request.function, arguments, position=request.position)
                invocation = call.invocation
                try:
                    outcome = await asyncio.shield(call.outcome)
                except asyncio.CancelledError:
                    if call.worker is None:
                        self._host.cancel(call)
                    raise
            return _response(invocation, outcome)

    async def send(self, request: pb.SendRequest, context: Context) -> pb.SendResponse:
        """Record a call that runs later; return the id of its invocation."""
        async with answering(context):
            await self._check_position(request.position)
            invocation = await self._host.send(
                request.function,
                request.arguments or b"{}",
                position=request.position,
                delay_s=request.delay,
                key=request.idempotency_key,
            )
            return pb.SendResponse(invocation=invocation)

    async def _check_position(self, position: int) -> None:
        positions = self._host.positions
        if not positions.is_known(position) and (fault := await positions.fault(position)):
            raise InvalidArgumentsError(
                f"Nothing was done: `position` {fault}", [{"field": "position", "problem": fault}]
            )


def _response(invocation: str, outcome: Returned | Failed) -> pb.InvokeResponse:
    """Return the answer for an outcome.

    Raises:
        Exception: the error of the function.
    """
    if isinstance(outcome, Failed):
        raise error_from(outcome)
    return pb.InvokeResponse(
        result=outcome.result, invocation=invocation, position=outcome.position
    )
