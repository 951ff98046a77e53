"""Write the reference part of docs/configuration.md from the schema. What stands above the marker is kept.

uv run docs/generate_config_reference.py
"""

from pathlib import Path

from lora_rl.config.capabilities import CAPABILITIES
from lora_rl.config.errors import show
from lora_rl.config.keys import REQUIRED, Key, all_keys, all_sections

PAGE = Path(__file__).with_name("configuration.md")
MARKER = "<!-- Below: written by docs/generate_config_reference.py. Edit lora_rl/config/schema instead. -->\n"

_ONLY = {capability.key: capability.works for capability in CAPABILITIES}


def render(page: str) -> str:
    """The page with its reference part written anew.

    Args:
        page: text of the page, with the marker in it once.

    Raises:
        ValueError: there is no marker, or more than one.
    """
    introduction, *rest = page.split(MARKER)
    if len(rest) != 1:
        raise ValueError(f"{PAGE.name} must hold the marker line once, but it is there {len(rest)} times: {MARKER}")
    return introduction + MARKER + "".join(_section(path, keys) for path, keys in _keys_by_section().items())


def _keys_by_section() -> dict[str, list[Key]]:
    """Keys under the section that holds them directly, in the order of the schema."""
    sections: dict[str, list[Key]] = {path: [] for path in all_sections()}
    for key in all_keys().values():
        sections[key.path.rpartition(".")[0]].append(key)
    return {path: keys for path, keys in sections.items() if keys}


def _section(path: str, keys: list[Key]) -> str:
    _, colon, purpose = (all_sections()[path].__doc__ or "").partition("\n")[0].partition(": ")
    heading = f"\n### `{path}`\n\n" + (f"{purpose[0].upper()}{purpose[1:]}\n\n" if colon else "")
    return heading + "| key | valid | default | meaning |\n| --- | --- | --- | --- |\n" + "".join(map(_row, keys))


def _row(key: Key) -> str:
    default = "required" if key.default is REQUIRED else f"`{show(key.default)}`"
    meaning = key.description
    if works := _ONLY.get(key.path):
        meaning += f" In this version only {' or '.join(f'`{show(value)}`' for value in works)}."
    cells = (f"`{key.path.rpartition('.')[2]}`", f"`{key.valid}`", default, meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
