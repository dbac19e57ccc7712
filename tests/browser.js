// What is wrong on the page, as a list of sentences.
(() => {
  const wrong = [], root = document.documentElement;
  if (root.scrollWidth > innerWidth) wrong.push(`the page is ${root.scrollWidth} wide on ${innerWidth}`);
  const numbers = colour => colour.match(/[\d.]+/g).map(Number);
  const light = colour => { const [r, g, b] = numbers(colour).slice(0, 3).map(v => {
    v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = element => { for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (!/, 0\)$/.test(colour) && colour !== 'transparent') return colour; } return 'rgb(255,255,255)'; };
  const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05); };
  const check = (element, colour, least, what) => { const found = contrast(colour, ground(element));
    if (found < least) wrong.push(`${what}: contrast ${found.toFixed(2)} below ${least}`); };
  document.querySelectorAll('h1, h2, th, td, caption, figcaption, .unit, li, summary').forEach(
    e => check(e, getComputedStyle(e).color, 4.5, e.tagName));
  document.querySelectorAll('svg text').forEach(e => { check(e, getComputedStyle(e).fill, 4.5, 'svg text');
    const height = e.getBoundingClientRect().height;
    if (height < 10) wrong.push(`svg text is ${height.toFixed(1)} high`);
    const box = e.getBoundingClientRect(), all = e.ownerSVGElement.getBoundingClientRect();
    if (box.left < all.left - 1 || box.right > all.right + 1) wrong.push(`cut off: ${e.textContent}`); });
  document.querySelectorAll('.curve').forEach(e => check(e, getComputedStyle(e).stroke, 3, 'a curve'));
  if (document.querySelectorAll('figure > svg').length !== 6) wrong.push('not six charts');
  return wrong; })()
