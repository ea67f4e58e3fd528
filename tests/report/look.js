// What a reader would notice of a page: the body of a function of (document, window).

const parse = (text) => {
  const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
  return [r, g, b, a];
};
const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
const background = (element) =>
  element === null
    ? [255, 255, 255]
    : over(parse(window.getComputedStyle(element).backgroundColor), background(element.parentElement));

// Contrast as WCAG 2 defines it.
const luminance = (rgb) => {
  const [r, g, b] = rgb.map((value) => {
    const v = value / 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (element) => {
  const style = window.getComputedStyle(element);
  const ink = luminance(parse(element.closest("svg") ? style.fill : style.color).slice(0, 3));
  const paper = luminance(background(element));
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
};
const fontSize = (element) => {
  const svg = element.closest("svg");
  const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
  return parseFloat(window.getComputedStyle(element).fontSize) * scale;
};

document.querySelectorAll("details").forEach((element) => { element.open = true; });
const elements = [...document.body.querySelectorAll("*")].filter((element) => !element.closest("title"));
const hasText = (element) =>
  [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
const texts = elements.filter(hasText);
const name = (element) => `${element.tagName} ${element.getAttribute("class")} ${element.textContent.slice(0, 30)}`;
const width = document.documentElement.clientWidth;
const isBeyond = (element) => !element.closest(".scroll") && element.getBoundingClientRect().right > width + 1;
const lefts = [...document.querySelectorAll("figure")].map((element) => element.getBoundingClientRect().left);

return {
  width,
  scrollWidth: document.documentElement.scrollWidth,
  beyond: elements.filter(isBeyond).map(name),
  pale: texts.filter((element) => contrast(element) < 4.5).map((element) => `${name(element)}: ${contrast(element)}`),
  page: luminance(background(document.body)),
  columns: new Set(lefts).size,
  smallest: Math.min(...texts.map(fontSize)),
};
