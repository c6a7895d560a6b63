"""Find each view that the model was trained on in a flat observation.

A view is found under its own name (``wrist``), under its key on the openpi wire
(``observation/wrist_image_left``, with or without ``observation/``), under LeRobot's
(``observation.images.wrist``), or under the name that the user maps to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from strands_cosmos3.embodiments import CameraRig
from strands_cosmos3.errors import ObservationError

ONE_VIEW = "image"
"""The view of a domain that composes none: its only picture."""


@dataclass(frozen=True)
class CameraMapping:
    """The views of a rig and the names under which they are found.

    Args:
        views: View -> the names under which it is looked for, in this order.
        mapped: View -> key, for views that the user mapped; they are looked for under that key
            only.
    """

    views: Mapping[str, tuple[str, ...]]
    mapped: Mapping[str, str]

    @property
    def names(self) -> dict[str, str]:
        """Every name that stands for a view -> the view."""
        return {name: view for view, names in self.views.items() for name in names}

    def with_mapped(self, given: Mapping[str, str]) -> CameraMapping:
        """The same views, those in ``given`` (view -> key) looked for under that key."""
        return CameraMapping(self.views, {**self.mapped, **given})

    def unmapped(self) -> tuple[str, ...]:
        """Views that the user's mapping leaves out; none if there is no such mapping."""
        return tuple(view for view in self.views if view not in self.mapped) if self.mapped else ()

    def key_of(self, view: str, names: Iterable[str]) -> str | None:
        """The name that holds a view, or None."""
        have = set(names)
        return next((name for name in self._candidates(view) if name in have), None)

    def require(self, names: Iterable[str]) -> None:
        """Refuse names among which a view is not.

        Raises:
            ObservationError: The message says which views are missing, what there is, and how to
                map it.
        """
        names = tuple(names)
        if missing := [view for view in self.views if self.key_of(view, names) is None]:
            raise _lacks([self._candidates(view)[0] for view in missing], missing, names)

    def read(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """The pictures by view.

        Raises:
            ObservationError: One is missing; the message says which, what there is, and how to map
                it.
        """
        cameras = [str(name) for name, value in flat.items() if getattr(value, "ndim", 0) == 3]
        found = {view: self.key_of(view, flat) for view in self.views}
        if found.get(ONE_VIEW, "") is None and len(cameras) == 1:
            found[ONE_VIEW] = cameras[0]
        if missing := [view for view, key in found.items() if key is None]:
            raise _lacks([self._candidates(view)[0] for view in missing], missing, cameras)
        return {view: flat[key] for view, key in found.items() if key is not None}

    def _candidates(self, view: str) -> tuple[str, ...]:
        return (self.mapped[view],) if view in self.mapped else self.views[view]


def cameras_of(rig: CameraRig | None) -> CameraMapping:
    """The views of a rig, found by name; without a rig, the one picture that there is."""
    if rig is None:
        return CameraMapping(
            {ONE_VIEW: (ONE_VIEW, "observation/image", "observation.images.image")}, {}
        )
    views = {
        view: (view, wire, wire.removeprefix("observation/"), f"observation.images.{view}")
        for view, wire in zip(rig.views, rig.wire_names, strict=True)
    }
    return CameraMapping(views, {})


def _lacks(looked_for: list[str], views: list[str], cameras: Iterable[str]) -> ObservationError:
    of = "" if looked_for == views else f" (view {', '.join(map(repr, views))})"
    return ObservationError(
        f"the observation lacks camera {', '.join(map(repr, looked_for))}{of}; it has: "
        f"{', '.join(cameras) or 'no camera'}. "
        f"Map another name to it with observation_mapping={{{views[0]!r}: '<its camera>'}}."
    )


def only_picture(images: Mapping[str, Any], embodiment: str) -> Any:
    """Return the picture of an embodiment that composes no views; ObservationError if there is
    none, or more than one.
    """
    if ONE_VIEW in images:
        return images[ONE_VIEW]
    if len(images) != 1:
        raise ObservationError(
            f"embodiment {embodiment!r} composes no views and takes one picture, got "
            f"{', '.join(images) or 'none'}."
        )
    return next(iter(images.values()))
