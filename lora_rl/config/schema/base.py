"""What all sections of the configuration share."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict

Precision = Literal["float32", "bfloat16"]
Fraction = Annotated[float, Gt(0), Le(1)]  # 0 < x <= 1
BelowOne = Annotated[float, Ge(0), Lt(1)]  # 0 <= x < 1


class Section(BaseModel):
    """A section: unknown keys are refused, values never change, NaN and infinity are not numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
