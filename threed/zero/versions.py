"""Two versions of the parameters: passes of one batch read one, while the other is updated (arXiv 2006.09503).

    versions.rotate()              the one before the newest becomes the newest, with its values: ready to be updated
    versions.show(newest)        layers read the newest version, or the one before
    versions.restore(whole)      after a load

An update writes what is older than all passes that are under way. Autograd saves a parameter itself, or a view of it: a
pass must find the version of its batch shown, whichever it is, and that one must not be written to.
"""

from __future__ import annotations

from torch import Tensor, nn

from threed import collectives
from threed.memory.tiers import InMemory
from threed.zero.gather import Gatherer
from threed.zero.layout import Layout
from threed.zero.state import PREVIOUS, State


class Versions:
    """The versions of all trainable parameters of a layout whose policy has two. earlier: the slices of the one before
    the newest, as states of their own, for checkpoints."""

    def __init__(self, layout: Layout, gatherer: Gatherer) -> None:
        self.gatherer = gatherer
        self._groups = [group for group in layout.groups if group.previous is not group.params]
        self._shown = self._newest = 0
        self._views: list[tuple[nn.Parameter, tuple[Tensor, Tensor]]] = [
            (slot.param, (group.view(slot, group.params), group.view(slot, group.previous)))
            for group in self._groups
            for slot in group.slots
        ]
        self._before = {
            bucket: InMemory(group.previous[bucket.own_first : bucket.own_last])
            for group in self._groups
            for bucket in group.buckets
        }
        self.earlier = [State(bucket, {PREVIOUS: own}) for bucket, own in self._before.items()]

    def rotate(self) -> None:
        """Makes the older version the newest, with the values of this rank's slices of the newest so far; the slices of
        others come with the gathers of the update."""
        self.gatherer.wait_all()
        for group in self._groups:
            group.swap_versions()
        self._newest = 1 - self._newest
        self.gatherer.show(self._shown == self._newest)
        for bucket, storage in self._before.items():
            assert isinstance(bucket.storage, InMemory)
            storage.exchange(bucket.storage)
            bucket.storage.tensor.copy_(storage.tensor)

    def show(self, newest: bool) -> None:
        """Points the layers' parameters at a version. Only passes on the newest wait for its gathers."""
        which = self._newest if newest else 1 - self._newest
        if which != self._shown:
            self._shown = which
            self.gatherer.show(newest=False)  # setting the data of a guarded parameter waits for it
            for param, views in self._views:
                param.data = views[which]
        self.gatherer.show(newest)

    def restore(self, whole: bool) -> None:
        """Makes both versions whole after their slices were set; or the older one equal to the newest. Collective."""
        self.gatherer.wait_all()
        for bucket, storage in self._before.items():
            if whole:
                window = bucket.group.previous[bucket.first : bucket.last]
                collectives.start_all_gather(storage.tensor, bucket.group.gather, out=window).wait()
        for group in self._groups if not whole else ():
            group.previous.copy_(group.params)
