"""The table of strategies, read from the registry: `python docs/strategies_table.py --markdown`."""

from axon_dist.parallel import STRATEGIES


def lines():
    """A line of the table for each strategy."""
    for name, row in STRATEGIES.items():
        others = ", ".join(f"`{other}`" for other in row.other_names)
        link = f"[`{name}`](strategies/{row.page}.md)"
        yield f"| {row.obstacle} | {link} | `{row.example}` | {others} |"


def pages():
    """The pages of `docs/strategies`, in the order of the table."""
    return list(dict.fromkeys(row.page for row in STRATEGIES.values()))


if __name__ == "__main__":
    print("| obstacle | take | a mesh for it | other names |\n|---|---|---|---|")
    print("\n".join(lines()))
