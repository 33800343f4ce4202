"""Two versions of the parameters: layers read one version while an update changes the other.

See PipeDream-2BW (arXiv 2006.09503).

    versions.rotate()           call it before an update: reuses the memory of the older version for
                                the newest version, which the update then changes
    versions.show(newest)       selects the version that layers read: the newest or the previous one
    versions.restore(both)      call it after a load, because a load sets only this rank's slices:
                                gathers the previous version or, if the load did not set its slices,
                                copies the newest version to it

Autograd saves the parameter itself, or a view of it, not a copy. A backward therefore needs the
same values in the same memory as its forward. So all passes of a batch must use the same version,
and an update must write to the other version.
"""

from __future__ import annotations

from torch import Tensor, nn

from threed.distributed import collectives
from threed.memory.tiers import InMemory
from threed.zero.gather import Gatherer
from threed.zero.layout import Layout
from threed.zero.state import PREVIOUS, State


class Versions:
    """The versions of all trainable parameters of a layout with two versions (`Policy.versions`).

    Args:
        layout: layout of the parameters.
        gatherer: gathers the parameters.

    Attributes:
        earlier: one `State` per bucket, with this rank's slice of the previous version.
            Checkpoints contain these states.
    """

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
        """Prepares an update, which writes new values to the older version of the parameters.

        First the two versions are swapped: the newest becomes the previous version. Then this
        rank's slices of the previous version are copied to the newest version, where the update
        changes them. The slices of other ranks are gathered after the update.
        """
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
        """Points the layers' parameters at the newest or at the previous version.

        Layers that use the previous version do not wait for gathers, because gathers write only to
        the newest version.

        Args:
            newest: True for the newest version, False for the previous version.
        """
        which = self._newest if newest else 1 - self._newest
        if which != self._shown:
            self._shown = which
            # removes the guards first, because setting `.data` of a guarded parameter would wait
            # for the parameter's gather
            self.gatherer.show(newest=False)
            for param, views in self._views:
                param.data = views[which]
        self.gatherer.show(newest)

    def restore(self, both: bool) -> None:
        """Completes the previous version of the parameters after slices were set. Collective.

        A load, for example, sets only this rank's slices. Before this call, the caller must gather
        the newest version from the slices of all ranks.

        Args:
            both: whether slices of both versions were set. If True, the previous version is
                gathered from the slices of all ranks. If False, only slices of the newest version
                were set, and the previous version becomes a copy of the newest.
        """
        self.gatherer.wait_all()
        for bucket, storage in self._before.items():
            if both:
                window = bucket.group.previous[bucket.first : bucket.last]
                collectives.start_all_gather(storage.tensor, bucket.group.gather, out=window).wait()
        for group in self._groups if not both else ():
            group.previous.copy_(group.params)
