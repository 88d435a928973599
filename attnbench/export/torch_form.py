"""Syntax trees of the torch form of our code: the parts of a function that run without kernels.

`on_kernels` is known to be False and `backend` to be "torch"; branches that these exclude are removed. Imports of
kernels and libraries become errors.
"""

import ast
import sys
from typing import Any

BACKEND = "torch"
KERNELS = "triton"
"""Name of the packages of ops/ that hold Triton kernels."""
RECURRENCE, OF_KERNELS = "Recurrence", ("packed", "backends")
"""Class of attnbench.ops whose calls lose these keywords."""
LIBRARIES = ("torch", "transformers")
"""Packages that an exported file may import, in addition to Python's own library and copied modules."""
BLOCKS = ("body", "orelse", "finalbody")
ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
REFUSAL = "raise RuntimeError('an exported model computes in torch alone')"
NAMESPACE = "attnbench::"


class TorchForm(ast.NodeTransformer):
    """Conversion of a definition to its torch form; `own` are root packages whose modules are copied."""

    def __init__(self, own: frozenset[str]) -> None:
        self.own = own
        self.own_imports: list[ast.stmt] = []
        """Imports of copied modules, moved out of functions."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == RECURRENCE:
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in OF_KERNELS]
        return ast.Constant(False) if name == "on_kernels" else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        first, second, operator = node.left, node.comparators[0], node.ops[0]
        if isinstance(first, ast.Subscript):
            name = getattr(first.slice, "value", "")
        else:
            name = first.id if isinstance(first, ast.Name) else first.attr if isinstance(first, ast.Attribute) else ""
        if name != "backend" or not isinstance(second, ast.Constant) or not isinstance(operator, (ast.Eq, ast.NotEq)):
            return node
        return ast.Constant((second.value == BACKEND) == isinstance(operator, ast.Eq))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        is_known = isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Constant)
        return ast.Constant(not node.operand.value) if is_known else node  # pyright: ignore[reportAttributeAccessIssue]

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        # False decides a conjunction and leaves a disjunction as it is; True the other way round.
        deciding = isinstance(node.op, ast.Or)
        values = [
            value for value in node.values if not (isinstance(value, ast.Constant) and value.value is not deciding)
        ]
        if any(isinstance(value, ast.Constant) for value in values):
            return ast.Constant(deciding)
        node.values = values
        return node if len(values) > 1 else values[0] if values else ast.Constant(not deciding)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            return node
        return node.body if node.test.value else node.orelse

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            return node
        return node.body if node.test.value else node.orelse

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Name operators after the module that contains their copy, because names must be unique; in hexadecimal
        digits, because the module's name contains the user's folder."""
        if not isinstance(node.value, str) or not node.value.startswith(NAMESPACE):
            return node
        name = node.value.removeprefix(NAMESPACE)
        return ast.parse(f"'of' + __name__.encode().hex() + '::{name}'", mode="eval").body

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        for inner in ast.walk(node):
            for block in BLOCKS:
                statements = getattr(inner, block, None)
                if isinstance(statements, list) and (statements or block == "body"):
                    setattr(inner, block, self._cut(statements))
        return node

    def _cut(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Remove unreachable statements, and replace imports of kernels and libraries by an error."""
        kept: list[ast.stmt] = []
        for statement in statements:
            names = imported(statement)
            if any(not self.may_import(name) for name in names):
                return [*kept, *ast.parse(REFUSAL).body]
            if any(name.partition(".")[0] in self.own for name in names) or getattr(statement, "level", 0):
                self.own_imports.append(statement)
                continue
            kept.append(statement)
            if isinstance(statement, ENDS):
                break
        return kept or [ast.Pass()]

    def may_import(self, module: str) -> bool:
        """True for modules that are copied or may be imported by an exported file."""
        root = module.partition(".")[0]
        return KERNELS not in module.split(".") and (
            root in self.own or root in LIBRARIES or root in sys.stdlib_module_names
        )


def imported(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and not statement.level:
        return [f"{statement.module}.{alias.name}" for alias in statement.names]
    return []
