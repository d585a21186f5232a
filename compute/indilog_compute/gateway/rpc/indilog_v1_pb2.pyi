from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tag(_message.Message):
    __slots__ = ("text", "number")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    text: str
    number: int
    def __init__(self, text: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("seqnum", "data", "tags", "aux", "time", "ordered_at")
    SEQNUM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    AUX_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    ORDERED_AT_FIELD_NUMBER: _ClassVar[int]
    seqnum: int
    data: bytes
    tags: _containers.RepeatedCompositeFieldContainer[Tag]
    aux: bytes
    time: float
    ordered_at: float
    def __init__(self, seqnum: _Optional[int] = ..., data: _Optional[bytes] = ..., tags: _Optional[_Iterable[_Union[Tag, _Mapping]]] = ..., aux: _Optional[bytes] = ..., time: _Optional[float] = ..., ordered_at: _Optional[float] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("data", "tags")
    DATA_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    tags: _containers.RepeatedCompositeFieldContainer[Tag]
    def __init__(self, data: _Optional[bytes] = ..., tags: _Optional[_Iterable[_Union[Tag, _Mapping]]] = ...) -> None: ...

class After(_message.Message):
    __slots__ = ("tag", "seqnum")
    TAG_FIELD_NUMBER: _ClassVar[int]
    SEQNUM_FIELD_NUMBER: _ClassVar[int]
    tag: Tag
    seqnum: int
    def __init__(self, tag: _Optional[_Union[Tag, _Mapping]] = ..., seqnum: _Optional[int] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("log", "position", "data", "tags")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    data: bytes
    tags: _containers.RepeatedCompositeFieldContainer[Tag]
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ..., data: _Optional[bytes] = ..., tags: _Optional[_Iterable[_Union[Tag, _Mapping]]] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("seqnum", "position")
    SEQNUM_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    seqnum: int
    position: int
    def __init__(self, seqnum: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class AppendBatchRequest(_message.Message):
    __slots__ = ("log", "position", "entries", "after")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    after: After
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., after: _Optional[_Union[After, _Mapping]] = ...) -> None: ...

class AppendBatchResponse(_message.Message):
    __slots__ = ("seqnums", "position")
    SEQNUMS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    seqnums: _containers.RepeatedScalarFieldContainer[int]
    position: int
    def __init__(self, seqnums: _Optional[_Iterable[int]] = ..., position: _Optional[int] = ...) -> None: ...

class LiveShardRequest(_message.Message):
    __slots__ = ("log", "position")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class LiveShardResponse(_message.Message):
    __slots__ = ("shard", "position")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    shard: int
    position: int
    def __init__(self, shard: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class AppendToShardRequest(_message.Message):
    __slots__ = ("log", "position", "data", "tags", "shard")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    data: bytes
    tags: _containers.RepeatedCompositeFieldContainer[Tag]
    shard: int
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ..., data: _Optional[bytes] = ..., tags: _Optional[_Iterable[_Union[Tag, _Mapping]]] = ..., shard: _Optional[int] = ...) -> None: ...

class AppendToShardResponse(_message.Message):
    __slots__ = ("seqnum", "shard", "position")
    SEQNUM_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    seqnum: int
    shard: int
    position: int
    def __init__(self, seqnum: _Optional[int] = ..., shard: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("log", "position", "seqnum", "fresh")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SEQNUM_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    seqnum: int
    fresh: bool
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ..., seqnum: _Optional[int] = ..., fresh: _Optional[bool] = ...) -> None: ...

class ReadNextRequest(_message.Message):
    __slots__ = ("log", "position", "tag", "bound", "wait", "fresh")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    tag: Tag
    bound: int
    wait: float
    fresh: bool
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ..., tag: _Optional[_Union[Tag, _Mapping]] = ..., bound: _Optional[int] = ..., wait: _Optional[float] = ..., fresh: _Optional[bool] = ...) -> None: ...

class ReadPrevRequest(_message.Message):
    __slots__ = ("log", "position", "tag", "bound", "fresh")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    tag: Tag
    bound: int
    fresh: bool
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ..., tag: _Optional[_Union[Tag, _Mapping]] = ..., bound: _Optional[int] = ..., fresh: _Optional[bool] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("record", "position")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    record: Record
    position: int
    def __init__(self, record: _Optional[_Union[Record, _Mapping]] = ..., position: _Optional[int] = ...) -> None: ...

class ReadRangeRequest(_message.Message):
    __slots__ = ("log", "position", "tag", "bound", "limit", "wait", "fresh")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    tag: Tag
    bound: int
    limit: int
    wait: float
    fresh: bool
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ..., tag: _Optional[_Union[Tag, _Mapping]] = ..., bound: _Optional[int] = ..., limit: _Optional[int] = ..., wait: _Optional[float] = ..., fresh: _Optional[bool] = ...) -> None: ...

class ReadRangeResponse(_message.Message):
    __slots__ = ("records", "position")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    position: int
    def __init__(self, records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ..., position: _Optional[int] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("log", "position", "tag", "bound")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    tag: Tag
    bound: int
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ..., tag: _Optional[_Union[Tag, _Mapping]] = ..., bound: _Optional[int] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    def __init__(self, records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ...) -> None: ...

class TailRequest(_message.Message):
    __slots__ = ("log", "position")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class TailResponse(_message.Message):
    __slots__ = ("tail", "position")
    TAIL_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    tail: int
    position: int
    def __init__(self, tail: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class NowRequest(_message.Message):
    __slots__ = ("log", "position")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class NowResponse(_message.Message):
    __slots__ = ("time", "position")
    TIME_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    time: float
    position: int
    def __init__(self, time: _Optional[float] = ..., position: _Optional[int] = ...) -> None: ...

class FindTimeRequest(_message.Message):
    __slots__ = ("log", "position", "time")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    time: float
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ..., time: _Optional[float] = ...) -> None: ...

class FindTimeResponse(_message.Message):
    __slots__ = ("seqnum", "position")
    SEQNUM_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    seqnum: int
    position: int
    def __init__(self, seqnum: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class TrimRequest(_message.Message):
    __slots__ = ("log", "position", "until", "tag")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    until: int
    tag: Tag
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ..., until: _Optional[int] = ..., tag: _Optional[_Union[Tag, _Mapping]] = ...) -> None: ...

class TrimResponse(_message.Message):
    __slots__ = ("position",)
    POSITION_FIELD_NUMBER: _ClassVar[int]
    position: int
    def __init__(self, position: _Optional[int] = ...) -> None: ...

class SetAuxRequest(_message.Message):
    __slots__ = ("log", "position", "seqnum", "aux")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SEQNUM_FIELD_NUMBER: _ClassVar[int]
    AUX_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    seqnum: int
    aux: bytes
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ..., seqnum: _Optional[int] = ..., aux: _Optional[bytes] = ...) -> None: ...

class SetAuxResponse(_message.Message):
    __slots__ = ("position",)
    POSITION_FIELD_NUMBER: _ClassVar[int]
    position: int
    def __init__(self, position: _Optional[int] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("age_seconds", "size_bytes")
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    age_seconds: float
    size_bytes: int
    def __init__(self, age_seconds: _Optional[float] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class SetRetentionRequest(_message.Message):
    __slots__ = ("log", "position", "retention")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    retention: Retention
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ...) -> None: ...

class SetRetentionResponse(_message.Message):
    __slots__ = ("position",)
    POSITION_FIELD_NUMBER: _ClassVar[int]
    position: int
    def __init__(self, position: _Optional[int] = ...) -> None: ...

class GetRetentionRequest(_message.Message):
    __slots__ = ("log", "position")
    LOG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    log: str
    position: int
    def __init__(self, log: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class GetRetentionResponse(_message.Message):
    __slots__ = ("retention", "position")
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    retention: Retention
    position: int
    def __init__(self, retention: _Optional[_Union[Retention, _Mapping]] = ..., position: _Optional[int] = ...) -> None: ...

class InvokeRequest(_message.Message):
    __slots__ = ("function", "arguments", "position", "idempotency_key")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    function: str
    arguments: bytes
    position: int
    idempotency_key: str
    def __init__(self, function: _Optional[str] = ..., arguments: _Optional[bytes] = ..., position: _Optional[int] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class InvokeResponse(_message.Message):
    __slots__ = ("result", "invocation", "position")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    INVOCATION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    result: bytes
    invocation: str
    position: int
    def __init__(self, result: _Optional[bytes] = ..., invocation: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class SendRequest(_message.Message):
    __slots__ = ("function", "arguments", "position", "idempotency_key", "delay")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    function: str
    arguments: bytes
    position: int
    idempotency_key: str
    delay: float
    def __init__(self, function: _Optional[str] = ..., arguments: _Optional[bytes] = ..., position: _Optional[int] = ..., idempotency_key: _Optional[str] = ..., delay: _Optional[float] = ...) -> None: ...

class SendResponse(_message.Message):
    __slots__ = ("invocation",)
    INVOCATION_FIELD_NUMBER: _ClassVar[int]
    invocation: str
    def __init__(self, invocation: _Optional[str] = ...) -> None: ...
