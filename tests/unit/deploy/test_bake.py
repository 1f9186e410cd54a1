"""docker/docker-bake.hcl: builds the images of the compose files, with the same arguments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from evoke_proxy import __version__

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())
IMAGES = {
    "proxy-cpu": ("compose.cpu.yaml", "proxy"),
    "proxy-gpu": ("compose.yaml", "proxy"),
    "llama-server-cpu": ("compose.cpu.yaml", "llama-server"),
    "llama-server-cuda": ("compose.yaml", "llama-server"),
}


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_constructor("!reset", lambda loader, node: None)
_Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))


def _blocks(kind: str) -> dict[str, dict[str, Any]]:
    """The blocks of a kind by name; texts without their quotation marks."""
    hcl2 = pytest.importorskip("hcl2", reason="needs the extra [docker]")
    parsed = hcl2.loads((ROOT / "docker/docker-bake.hcl").read_text("utf-8"))
    return {
        _plain(name): {_plain(key): _plain(value) for key, value in body.items()}
        for block in parsed[kind]
        for name, body in block.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.strip('"') if isinstance(value, str) else value


@pytest.mark.parametrize("name", IMAGES)
def test_a_target_builds_the_image_of_the_compose_file(name: str) -> None:
    targets, variables = _blocks("target"), _blocks("variable")
    file, service = IMAGES[name]
    build = yaml.load((ROOT / "docker" / file).read_text("utf-8"), _Loader)["services"][service][
        "build"
    ]
    whole = yaml.load((ROOT / "docker/compose.yaml").read_text("utf-8"), _Loader)
    dockerfile = whole["services"][service]["build"]["dockerfile"]
    target = targets[name]
    assert target["dockerfile"] == dockerfile and (ROOT / dockerfile).is_file()
    assert target.get("target") == whole["services"][service]["build"].get("target")
    args = {
        key: variables[value]["default"] if value in variables else value
        for key, value in target["args"].items()
    }
    expected = {
        key: re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(value)) for key, value in build["args"].items()
    }
    assert args == expected
    declared = re.findall(r"^ARG (\w+)", (ROOT / dockerfile).read_text("utf-8"), re.MULTILINE)
    assert args.keys() <= set(declared)


def test_each_target_is_in_a_group_and_has_the_version() -> None:
    targets, groups = _blocks("target"), _blocks("group")
    in_groups = [name for group in groups.values() for name in group["targets"]]
    assert sorted(in_groups) == sorted(targets.keys() - {"common"}) == sorted(IMAGES)
    assert all(targets[name]["inherits"] == ["common"] for name in in_groups)
    assert _blocks("variable")["VERSION"]["default"] == __version__
    assert len({tag for name in in_groups for tag in targets[name]["tags"]}) == len(in_groups)
