"""The live view of `top`. Needs the extra `top`."""

from __future__ import annotations

from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Header, Static

from rackserve.base.errors import ConfigError
from rackserve.top import HEAD, Server, Sight, flow, headline, pool_lines, rank_rows, router_lines


class TopScreen(App[None]):
    """Looks every `interval_s` seconds from a thread; a server that is gone is said so and asked again."""

    TITLE = "rackserve top"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "quit"), Binding("space", "pause", "pause or go on")]
    CSS = "Static { padding: 0 1; } DataTable { height: auto; margin: 1 0; } .bad { color: $error; }"

    def __init__(self, server: Server, interval_s: float) -> None:
        super().__init__()
        self._server = server
        self._interval_s = interval_s
        self._before: Sight | None = None
        self._paused = False
        self._looking = False

    def compose(self) -> ComposeResult:
        """State, flow, ranks, pool."""
        yield Header()
        yield Static("looking ...", id="state", markup=False)
        yield Static("", id="flow", markup=False)
        yield DataTable(id="ranks", cursor_type="none")
        yield Static("", id="pool", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.sub_title = self._server.url
        self.query_one("#ranks", DataTable).add_columns(*HEAD)
        self.set_interval(self._interval_s, self.look)
        self.look()

    def look(self) -> None:
        """Ask the server, unless it is being asked or the view is held."""
        if not self._looking and not self._paused:
            self._looking = True
            self.run_worker(self._ask, thread=True)

    def _ask(self) -> None:
        """In a thread: what is seen, or why nothing is, goes back to the screen."""
        try:
            seen: Sight | str = self._server.look()
        except ConfigError as error:
            seen = str(error)
        self.call_from_thread(self._take, seen)

    def _take(self, seen: Sight | str) -> None:
        self._looking = False
        if isinstance(seen, Sight):
            self.show(seen)
        else:
            self._tell(seen, bad=True)

    def show(self, now: Sight) -> None:
        """Everything seen since the look before."""
        before, self._before = self._before or now, now
        self._tell(headline(now), bad=now.health.get("phase") != "ready")
        if now.is_router:
            self.query_one("#ranks", DataTable).display = False
            self.query_one("#flow", Static).update("\n".join(router_lines(before, now)[1:]))
            return
        self.query_one("#flow", Static).update("\n".join(flow(before, now)))
        self.query_one("#pool", Static).update("\n".join(pool_lines(before, now)[1:]))
        table = self.query_one("#ranks", DataTable)
        table.clear()
        table.add_rows(rank_rows(before, now))

    def _tell(self, text: str, *, bad: bool) -> None:
        state = self.query_one("#state", Static)
        state.update(text)
        state.set_class(bad, "bad")

    def action_pause(self) -> None:
        """Hold the view, or go on."""
        self._paused = not self._paused
        self.sub_title = f"{self._server.url}{' (held)' if self._paused else ''}"
