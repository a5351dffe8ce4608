"""docs/reference/plan.md equals the output of its generator, and its links resolve."""

import re

from golden.plan_page import PAGE, page

COMMAND = "python tests/golden/plan_page.py"


def test_the_page_equals_the_declarations() -> None:
    assert PAGE.read_text() == page(), f"run {COMMAND}"


def test_every_link_of_the_page_leads_to_a_page_and_a_heading() -> None:
    links = re.findall(r"\]\(([^)#]+)#?([^)]*)\)", page())
    assert links
    for name, anchor in links:
        headings = re.findall(r"^#+ (.+)$", (PAGE.parent / name).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, f"{name}#{anchor}"
