"""Write the script that draws the charts of a page, vega.js, from what vl-convert carries.

Run it after an upgrade of vl-convert: ``python tools/vega_bundle.py``.
"""

from __future__ import annotations

from pathlib import Path

import vl_convert

NOTICE = """\
/* Vega, as bundled by vl-convert. Copyright (c) 2015-2023 University of Washington Interactive Data Lab
   (BSD-3-Clause). With d3, topojson-client and internmap, Copyright 2010-2023 Mike Bostock (ISC), and
   delaunator, Copyright 2021 Mapbox (ISC). The licences are in the file NOTICE of fedmerit. */
"""
PATH = Path(__file__).resolve().parents[1] / "src" / "fedmerit" / "report" / "page" / "vega.js"


def bundle() -> str:
    """Return the script that defines ``vega`` (View, parse, Warn) for charts that are compiled to Vega."""
    names, version = "View, parse, Warn", vl_convert.get_vega_version()
    address = f"https://cdn.jsdelivr.net/npm/vega@{version}/+esm.js"  # a name, not fetched
    script = vl_convert.javascript_bundle(f'import {{{names}}} from "{address}"; window.vega = {{{names}}};')
    return NOTICE + script.strip() + "\n"


if __name__ == "__main__":
    PATH.write_text(bundle(), encoding="utf-8")
