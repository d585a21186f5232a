"""Finds what a mutation may change in a source file: one operator, number, word or statement.

Left out is what is no behaviour: annotations, decorators, asserts and `check_invariants`, which
only check; texts, log calls, `__repr__`, and keywords of class definitions.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = (
    "indilog/kernel", "indilog/wire", "indilog/replayed", "ordering", "storage", "index_tier",
    "compute", "cells", "libs",
)  # fmt: skip
"""What is mutated."""

_COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_CALCULATED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_LOGS: Final = ("get_logger", "_tell(", "logger", "_log.")
_UNCHANGED: Final = ("__repr__", "check_invariants", "__str__")


class Site(NamedTuple):
    """One possible mutation.

    Attributes:
        file: relative to the root.
        line: of the change, from 1.
        start, end: of the replaced source, as offsets in its UTF-8 bytes.
        before, after: the replaced source and its replacement.
        function: the qualified name of the function or class around it.
        number: counts equal mutations in one function, from 0.
    """

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str
    function: str
    number: int = 0

    def mutated(self, source: bytes) -> bytes:
        """Return the source with the mutation."""
        assert source[self.start : self.end].decode() == self.before
        return source[: self.start] + self.after.encode() + source[self.end :]

    def digest(self, seed: int) -> str:
        """Return a hash that orders sites by chance, and does not depend on other functions."""
        parts = (seed, self.file, self.function, self.before, self.after, self.number)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def sample(seed: int, count: int, folders: Sequence[str] = FOLDERS) -> list[Site]:
    """Return `count` mutations of these folders, chosen by the seed, by file and line.

    Edits elsewhere leave a chosen mutation chosen: those with the least hashes are.
    """
    found = (
        site
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for site in sites(str(path.relative_to(ROOT)), path.read_bytes())
    )
    return sorted(sorted(found, key=lambda site: site.digest(seed))[:count])


def sites(file: str, source: bytes) -> Iterator[Site]:
    """Yield all mutations of one file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: Counter[tuple[str, str, str]] = Counter()
    for function, node, new in _replacements(ast.parse(source), ""):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before, after = source[start:end].decode(), ast.unparse(new)
        if isinstance(new, ast.expr) and not isinstance(new, ast.Constant | ast.Slice):
            after = f"({after})"
        key = function, before, after
        yield Site(file, node.lineno, start, end, before, after, function, seen[key])
        seen[key] += 1


_Code = ast.expr | ast.stmt


def _replacements(
    node: ast.AST | None, function: str, *, is_condition: bool = False
) -> Iterator[tuple[str, _Code, _Code]]:
    """Yield (function, node, replacement) of a tree, without what is no behaviour."""
    if node is None or (isinstance(node, ast.Expr) and _is_log_call(node)):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if node.name in _UNCHANGED:
            return
        function = f"{function}.{node.name}".lstrip(".")
        returns = None if isinstance(node, ast.ClassDef) else node.returns
        is_condition = isinstance(returns, ast.Name) and returns.id == "bool"
    if isinstance(node, ast.Return) and node.value is not None and is_condition:
        yield function, node, ast.Return(ast.UnaryOp(ast.Not(), node.value))
    if isinstance(node, _Code):
        yield from ((function, node, new) for new in (*_operators(node), *_others(node)))
    for child in _behaviour(node):
        yield from _replacements(child, function, is_condition=is_condition)


def _behaviour(node: ast.AST) -> Iterable[ast.AST | None]:
    """Return the children of a node that are behaviour; some may be None."""
    match node:
        case ast.Assert() | ast.JoinedStr():
            return ()
        case ast.FunctionDef(args=args, body=body) | ast.AsyncFunctionDef(args=args, body=body):
            return (*args.defaults, *args.kw_defaults, *body)
        case ast.ClassDef(body=body):
            return body
        case ast.AnnAssign(value=value):
            return (value,)
        case _:
            return ast.iter_child_nodes(node)


def _operators(node: _Code) -> Iterator[ast.expr]:
    """Yield an expression with another operator."""
    match node:
        case ast.Compare(left, [first, *others], compared):
            yield ast.Compare(left, [_COMPARED[type(first)](), *others], compared)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.BinOp(left, op, right) if type(op) in _CALCULATED:
            if not (_is_joined(left) or _is_joined(right)):
                yield ast.BinOp(left, _CALCULATED[type(op)](), right)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case _:
            pass


def _others(node: _Code) -> Iterator[_Code]:
    """Yield an expression with another number or bound; another statement, or none."""
    match node:
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)
        case ast.Slice(lower, upper, step):
            if lower is not None and not isinstance(lower, ast.Constant):
                yield ast.Slice(_plus_one(lower), upper, step)
            if upper is not None and not isinstance(upper, ast.Constant):
                yield ast.Slice(lower, _plus_one(upper), step)
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.Expr(ast.Call() | ast.Await()):
            yield ast.Pass()
        case _:
            pass


def _is_joined(operand: ast.expr) -> bool:
    """Whether `+` joins texts or sequences with it, rather than adds."""
    is_text = isinstance(operand, ast.Constant) and not isinstance(operand.value, int | float)
    return is_text or isinstance(operand, ast.JoinedStr | ast.List | ast.Tuple)


def _plus_one(bound: ast.expr) -> ast.expr:
    return ast.BinOp(bound, ast.Add(), ast.Constant(1))


def _is_log_call(node: ast.Expr) -> bool:
    return any(word in ast.unparse(node) for word in _LOGS)
