"""The version that a request wants to be sampled by, in the words of other rollout services."""

from __future__ import annotations

from pydantic import Field

from headway.contracts.errors import VersionMoved
from headway.contracts.types import PolicyVersion
from headway.dialects.served_model import ServedModel
from headway.dialects.unsupported import RequestPart


class VersionWanted(RequestPart):
    """Both may be given."""

    min_version: PolicyVersion | None = Field(None, ge=0)
    """The oldest that may serve when the request comes."""
    exact_version: PolicyVersion | None = Field(None, ge=0)
    """The one that has to serve when the request comes."""

    def exact(self, model: ServedModel) -> PolicyVersion | None:
        """Return the one version that may sample the first token, if it is one.

        Raises:
            VersionMoved: none that is wanted serves yet; the request may be sent again.
        """
        wanted = max(self.min_version or 0, self.exact_version or 0)
        if wanted > model.version:
            raise VersionMoved(
                f"version {model.version} serves, and weight_version wants {wanted}; send it again"
            )
        return self.exact_version
