"""The names that threed uses of pydantic. No other module imports pydantic, so there is one error if it is missing."""

from __future__ import annotations

from threed.packages import missing

try:
    from pydantic import AfterValidator as AfterValidator
    from pydantic import BaseModel as BaseModel
    from pydantic import BeforeValidator as BeforeValidator
    from pydantic import ConfigDict as ConfigDict
    from pydantic import Field as Field
    from pydantic import ValidationError as ValidationError
    from pydantic import model_validator as model_validator
    from pydantic.fields import FieldInfo as FieldInfo
    from pydantic_core import ErrorDetails as ErrorDetails
except ImportError as error:
    raise missing("pydantic>=2.7", "threed", error) from error
