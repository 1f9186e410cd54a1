"""Who may operate the proxy: asked before everything under /evoke/ but health and readiness."""

from __future__ import annotations

from aiohttp import web

from evoke_proxy.engine import Engine


async def admit(request: web.Request, engine: Engine) -> None:
    """Return when this request may see and change what is everybody's; else raise an EvokeError.

    Who reaches the address may. A browser sends the token that its user has typed in as
    `Authorization: Bearer`, once an answer was 401.
    """


async def admit_page(request: web.Request, engine: Engine) -> None:
    """As `admit`, for the files of the page: they say nothing, and a browser asks for them before
    anybody can have typed in a token."""
