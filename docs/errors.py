"""The table of error codes, read from the source: `python docs/errors.py --markdown`.

It is always Markdown; `docs/hooks.py` reads the option, and then shows the table as such.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).parents[1] / "axon_dist"
# Calls whose result reads like their argument, such as `sorted(names)` or `"; ".join(names)`.
SAME = {"byte_size", "dict", "first_few", "float", "int", "list", "max", "min", "repr", "rstrip"}
SAME |= {"_shortened", "set", "sorted", "split", "str", "str_short", "tuple", "typeof"}
SAME_AS_LAST = {"filter", "join", "map"}
# Attributes that a message shows in place of the thing that has them.
SHOWN = {"name", "value", "path"}
# The part of an expression that its words are about, such as the iterated thing's elements.
INNER = ("elt", "body", "left", "value")
FIELD = re.compile(r"{([^{}!:]*)[^{}]*}")
START, END = "\x01", "\x02"


MODULES = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def constants() -> dict[str, str]:
    """The texts of the package's constants, by name; a name with two texts is left out."""
    texts: dict[str, set[str]] = {}
    for module in MODULES.values():
        for node in module.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = node.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    texts.setdefault(node.targets[0].id, set()).add(value.value)
    return {name: found.pop() for name, found in texts.items() if len(found) == 1}


CONSTANTS = constants()


def words(node: ast.AST) -> str:
    """The value of an expression in a word or two, such as `number of names` for `len(names)`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name not in SHOWN | {"__name__"}:
            return name.strip("_").lower().replace("_", " ")
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
        case ast.Call():
            return words_of_call(node)
        case ast.BinOp(left=ast.Constant(value=value), op=ast.Mult(), right=thing):
            return f"{value} * {words(thing)}"
        case ast.Constant(value=value):
            return str(value)
        case ast.BoolOp(values=things) | ast.Set(elts=things):
            return words(things[0])
        case ast.JoinedStr(values=[*_, ast.FormattedValue(value=thing)]):
            return words(thing)
    inner = next((x for name in INNER if (x := getattr(node, name, None)) is not None), None)
    return "..." if inner is None else words(inner)


def words_of_call(node: ast.Call) -> str:
    """The words for a call; some functions show only their argument or their object."""
    function = node.func
    name = getattr(function, "id", None) or getattr(function, "attr", "")
    if name == "len":
        return f"number of {words(node.args[0])}"
    if name == "type":
        return f"class of {words(node.args[0])}"
    if name in SAME_AS_LAST:
        return words(node.args[-1])
    if name in SAME and node.args:
        return words(node.args[0])
    if name in SAME and isinstance(function, ast.Attribute):
        return words(function.value)
    return words(function)


def text(node: ast.AST) -> str:
    """The text of an expression as far as it is known; each unknown value is a placeholder."""
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.JoinedStr(values=parts):
            return "".join(map(text, parts))
        case ast.FormattedValue(value=ast.Name(id=name), conversion=conversion) if (
            name in CONSTANTS
        ):
            return repr(CONSTANTS[name]) if conversion == ord("r") else CONSTANTS[name]
        case ast.FormattedValue(value=value):
            return text(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text(left) + text(right)
    return f"{START}{words(node)}{END}"


def template(sentence: str) -> str:
    """A format string, as rules have them, with its fields as placeholders."""

    def placeholder(field: re.Match[str]) -> str:
        return f"{START}{words(ast.parse(field[1], mode='eval').body)}{END}"

    literal = sentence.replace("{{", "\x03").replace("}}", "\x04")
    return FIELD.sub(placeholder, literal).replace("\x03", "{").replace("\x04", "}")


def calls() -> Iterator[tuple[ast.Call, str, ast.Module]]:
    """Yields each call in the package that gives a code, the code, and the module."""
    for path, module in MODULES.items():
        if "code=" not in path.read_text():  # as most modules
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and node.args:
                codes = [x.value for x in node.keywords if x.arg == "code"]
                if codes and isinstance(codes[0], ast.Constant) and codes[0].value:
                    yield node, codes[0].value, module


def returned(node: ast.expr, module: ast.Module) -> ast.expr:
    """What the function of the module returns whose result is the message; else the message."""
    if isinstance(node, ast.Name):
        assigned = [each for each in ast.walk(module) if isinstance(each, ast.Assign)]
        values = [each.value for each in assigned if ast.unparse(each.targets[0]) == node.id]
        node = values[-1] if values else node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for each in ast.walk(module):
            if isinstance(each, ast.FunctionDef) and each.name == name:
                last = each.body[-1]
                return last.value if isinstance(last, ast.Return) and last.value else node
    return node


def errors() -> list[tuple[str, str, str]]:
    """Code, class and message of every error that has a code, sorted by code."""
    found = set()
    for call, code, module in calls():
        kind = ast.unparse(call.func).rpartition(".")[2]
        if kind in ("row", "_rule"):  # a row of rules: name, class, sentence, condition
            found.add((code, ast.unparse(call.args[1]), template(text(call.args[2]))))
        else:
            kind = {"warn": "AxonDistWarning", "error": "AxonDistError"}.get(kind, kind)
            found.add((code, kind, text(returned(call.args[0], module))))
    return sorted(found)


if __name__ == "__main__":
    print("| code and class | message |\n|---|---|")
    for code, kind, message in errors():
        # In code, because Markdown would read the brackets as HTML.
        shown = re.sub(f"{START}([^{END}]*){END}", r"`<\1>`", message)
        shown = shown.replace("``", "` `").replace("|", "\\|").replace("\n", " ")
        # One column for both, so that the message fits on a phone.
        print(f"| `{code}`<br>{kind} | {shown} |")
