// Read a list of [tex, display] as JSON, write a list of {html} or {error} as JSON.
import { readFileSync } from "node:fs";
import katex from "katex";

const typeset = ([tex, displayMode]) => {
  try {
    const options = { displayMode, output: "htmlAndMathml", strict: "error" };
    return { html: katex.renderToString(tex, options) };
  } catch (error) {
    return { error: error.message };
  }
};
const formulas = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(formulas.map(typeset)));
