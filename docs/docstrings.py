"""Example sections of docstrings as code; by themselves they are shown as quotes of quotes."""

import griffe


class ExampleSections(griffe.Extension):
    """Calls every section `Example` by the name that the parser knows."""

    def on_object(self, *, obj, **_):
        """Renames the sections of one object."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
