"""How ``vega.js`` is made: Vega's runtime alone, from the copy that vl-convert carries; run it to do so."""

from __future__ import annotations

from pathlib import Path

NOTICE = """\
/* Vega, as bundled by vl-convert. Copyright (c) 2015-2023 University of Washington Interactive Data Lab
   (BSD-3-Clause). With d3, topojson-client and internmap, Copyright 2010-2023 Mike Bostock (ISC), and
   delaunator, Copyright 2021 Mapbox (ISC). The licences are in the file NOTICE of fedmerit. */
"""
PATH = Path(__file__).with_name("vega.js")


def bundle() -> str:
    """The script that defines ``vega`` for the page: View, parse, Warn. Charts come compiled to Vega."""
    import vl_convert

    address = (
        f"https://cdn.jsdelivr.net/npm/vega@{vl_convert.get_vega_version()}/+esm.js"  # a name, not fetched
    )
    names = "View, parse, Warn"
    script = vl_convert.javascript_bundle(f'import {{{names}}} from "{address}"; window.vega = {{{names}}};')
    return NOTICE + script.strip() + "\n"


if __name__ == "__main__":
    PATH.write_text(bundle(), encoding="utf-8")
