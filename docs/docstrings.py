"""What griffe does not know of docstrings and classes here, before pages are made of them."""

import griffe


class ExampleSections(griffe.Extension):
    """Calls every section `Example` by the name that the parser knows."""

    def on_object(self, *, obj, **_):
        """Renames the sections of one object."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")


class NamedTuples(griffe.Extension):
    """Gives a `NamedTuple` parameters for its fields, as griffe does for a dataclass."""

    def on_class_members(self, *, cls, **_):
        """Adds the method that `typing` adds when the program runs."""
        if "NamedTuple" not in map(str, cls.bases):
            return
        fields = [
            griffe.Parameter(
                name,
                annotation=field.annotation,
                kind=griffe.ParameterKind.positional_or_keyword,
                default=field.value,
            )
            for name, field in cls.attributes.items()
            if field.annotation is not None
        ]
        of_itself = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
        method = griffe.Function("__init__", parameters=griffe.Parameters(of_itself, *fields))
        cls.set_member("__init__", method)
